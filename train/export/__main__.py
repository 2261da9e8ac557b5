"""Export a training folder as a plain Transformers directory (python -m train.export).

model.safetensors    the weights; above shard_size model-00001-of-0000N.safetensors and an
                     index. With n-grams there is always an index: it tells servers which
                     *.safetensors files are weights
config.json, generation_config.json, tokenizer files, chat_template.jinja
adapter/             with lora=kept, the adapter in peft's format; model.safetensors then has
                     the base model's weights
uno/                 a copy of a gated adapter without embedding rows of its own, in the
                     format of SGLang and vLLM
custom_generate/     the decoder, for use with Transformers alone
README.md            the model card; with report=DIR it includes the report's figures
ngrams.safetensors   the n-gram table of the training data, if any
adaptive.json        adaptive and control ids, L, provenance; absent without adaptive tokens
manifest.json        written last

With lora=uno the directory has only the files of uno/, adaptive.json and manifest.json.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.adapter import ADAPTIVE_FILE
from conf.console import print_line
from conf.errors import UserError
from conf.runs.files import write_json
from conf.runs.fingerprint import fingerprint_file
from conf.runs.stage import (
    atomic_folder,
    collect_provenance,
    is_finished,
    read_manifest,
    write_manifest,
)
from conf.runs.tracker import TENSORBOARD, log_files, start_run
from conf.settings.cli import run
from data_prep.ngrams import TABLE
from train.export import (
    UNO,
    ExportConfig,
    check_uno,
    has_uno_format,
    keeps_adapter,
    trained_lora,
)

# Imported late: errors in the settings appear before PyTorch is loaded.
if TYPE_CHECKING:
    import torch

    from train.export.trained import Trained


UPLOAD_SECONDS = 3600.0  # for a model of many GB


def main(config: ExportConfig) -> None:
    """Export unless `out` is finished; with `report`, add its figures to the model card."""
    manifest = read_manifest(config.checkpoint, "checkpoint", "checkpoint")
    lora = trained_lora(manifest)
    check_uno(config, manifest)
    keep_adapter = keeps_adapter(config, lora)
    adapter = "kept" if keep_adapter else "merged"
    if config.lora == UNO:
        adapter = UNO
    settled = replace(config, lora=adapter if lora.rank else None)
    origin = collect_provenance(
        settled, {"checkpoint": config.checkpoint}, ignore=["report", "tracker"]
    )
    kind = "adapter" if adapter == UNO else "model"
    finished = is_finished(config.out, kind, origin)
    if config.report and not finished:
        raise UserError(
            f"report={config.report} must be of the finished directory out={config.out}, "
            "got none. Export without report= first."
        )
    if not finished and adapter == UNO:
        write_adapter(config, origin)
    elif not finished:
        write(config, origin, keep_adapter=keep_adapter)
    elif config.report:
        add_report(config, manifest)
    else:
        print_line(f"export: {config.out} is finished: nothing to do")


def write(
    config: ExportConfig, origin: Mapping[str, Any], *, keep_adapter: bool
) -> None:
    """Write and verify the model directory; write nothing if a step fails."""
    import torch

    from train.export.card import write_card
    from train.export.sidecars import write_custom_generate, write_sidecars
    from train.export.trained import open_trained
    from train.export.verify import verify

    trained = open_trained(config.checkpoint, keep_adapter=keep_adapter)
    manifest = trained.manifest
    step = trained.checkpoint.step
    dtype = getattr(torch, config.dtype)
    verified: dict[str, Any] | None = None
    sentence = "not verified"
    with atomic_folder(config.out) as out:
        write_sidecars(
            trained.folder,
            out,
            manifest,
            step=step,
            dtype=dtype,
            keep_adapter=keep_adapter,
        )
        write_model(trained, out, dtype, config)
        if config.verify:
            weights, difference = verify(out, trained, dtype)
            verified = {"weights": weights, "logit_difference": difference}
            sentence = (
                f"read back: all {weights} weights equal, logits differ by at most "
                f"{difference:.2g} from the training's"
            )
        write_custom_generate(out)
        write_card(out, manifest, step=step, verified=verified)
        write_manifest(
            out,
            "model",
            origin,
            parameters=manifest["parameters"],
            step=step,
            verified=verified,
            ngrams=fingerprint_file(out / TABLE) if trained.table else None,
            decontaminated=(manifest["data"] or {}).get("decontaminated"),
        )
    size = f"{manifest['parameters'] / 1e6:.1f}M parameters"
    print_line(f"export: wrote {config.out} ({size}, {config.dtype})")
    print_line(f"export: {sentence}")
    track(config, manifest)


def track(config: ExportConfig, manifest: Mapping[str, Any]) -> None:
    """Log the directory as an artifact of a W&B run in the training folder.

    TensorBoard has no artifacts, and its run would remove the training's event files.
    """
    if config.tracker.mode == TENSORBOARD:
        return
    out = Path(config.out)
    name = out.resolve().name
    run = start_run(
        config.tracker,
        Path(config.checkpoint),
        name=f"{name}-export",
        job_type="export",
        settings={"dtype": config.dtype, "out": config.out},
        tell=print_line,
        file="export.json",
        upload_seconds=UPLOAD_SECONDS,
    )
    if run is None:
        return
    facts = {"step": manifest["step"], "L": manifest["L"], "base": manifest["base"]}
    run.send(lambda run: log_files(run, f"model-{name}", "model", out, facts))
    run.finish()


def write_adapter(config: ExportConfig, origin: Mapping[str, Any]) -> None:
    """Write and verify the adapter alone, in Uno's format; write nothing if a step fails."""
    import torch

    from train.export.sidecars import adaptive_json
    from train.export.trained import open_trained
    from train.export.uno import write_uno
    from train.lora import PlainWeights

    trained = open_trained(config.checkpoint, keep_adapter=True)
    step = trained.checkpoint.step
    weights = trained.served_weights(getattr(torch, config.dtype))
    assert isinstance(weights, PlainWeights)
    with atomic_folder(config.out) as out:
        count = write_uno(trained, weights, out, verify=config.verify)
        described = adaptive_json(trained.folder, trained.manifest, step=step)
        assert described is not None
        # Only a model directory has the head and the n-grams.
        described["head"] = False
        described["ngrams"]["table"] = None
        write_json(out / ADAPTIVE_FILE, described)
        verified = None if count is None else {"weights": count}
        write_manifest(out, "adapter", origin, step=step, verified=verified)
    print_line(f"export: wrote {config.out}, an adapter for SGLang and vLLM")
    sentence = "not verified"
    if count is not None:
        sentence = f"read back: all {count} weights equal the training's"
    print_line(f"export: {sentence}")
    track(config, trained.manifest)


def write_model(
    trained: "Trained", out: Path, dtype: "torch.dtype", config: ExportConfig
) -> None:
    """Write the weights, a kept adapter and the n-gram table into `out`."""
    from train.export.uno import write_uno
    from train.export.weights import write_weights
    from train.head import write_head
    from train.lora import PlainWeights

    weights = trained.served_weights(dtype)
    if isinstance(weights, PlainWeights) and trained.keep_adapter:
        weights.save_adapter(out / "adapter")
        write_head(trained.weights(dtype), out / "adapter", dtype)
        if has_uno_format(trained.manifest) and weights.short_targets():
            write_uno(trained, weights, out / UNO, verify=config.verify)
    write_weights(
        trained.config,
        weights,
        out,
        dtype=dtype,
        shard_size=config.shard_size,
        indexed=trained.table is not None,
    )
    if trained.table:
        shutil.copyfile(trained.table, out / TABLE)


def add_report(config: ExportConfig, manifest: Mapping[str, Any]) -> None:
    """Rewrite the model card of the finished directory with the figures of a report."""
    from train.export.card import write_card

    out = Path(config.out)
    exported = read_manifest(out, "model", "out")
    write_card(
        out,
        manifest,
        step=exported["step"],
        verified=exported["verified"],
        report=config.report,
    )
    print_line(f"export: wrote the figures of {config.report} into the model card")


if __name__ == "__main__":
    run("export", ExportConfig, main)
