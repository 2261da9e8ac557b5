"""python -m train.export: a training folder in, a plain Transformers directory out.

model.safetensors    the weights; above shard_size model-00001-of-0000N.safetensors and an index. With n-grams
                     always an index, from which servers know which *.safetensors are weights
config.json, generation_config.json, tokenizer files, chat_template.jinja
adapter/             with lora=kept, as peft reads it; the weights beside it are the base model's
custom_generate/     the decoder, for use with Transformers alone
README.md            the model card; with report=DIR including the report's figures
ngrams.safetensors   the n-gram table of the training data, if any
adaptive.json        adaptive and control ids, L, provenance; absent without adaptive tokens
manifest.json        written last
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conf import UserError, run
from conf.console import print_line
from conf.errors import Refusing
from conf.fingerprint import fingerprint_file
from conf.stage import (
    MANIFEST,
    is_finished,
    made_from,
    read_manifest,
    staged,
    write_manifest,
)
from data_prep.ngrams import TABLE
from data_prep.vocab import Vocab
from train.export import ExportConfig, keeps_adapter, trained_lora

FACTS = (
    "adaptive",
    "L",
    "validation",
    "inputs",
    "step",
    "commit",
)  # further ones that an export reads
# Settings that do not change what the directory contains.
CHANGEABLE = (
    "data",
    "verify_sequences",
    "report",
    "push",
    "private",
    "tracker",
    "artifact",
)


def main(config: ExportConfig) -> None:
    """Export, unless `out` already holds the result, and publish it as the settings ask."""
    manifest = read_manifest(config.checkpoint, "checkpoint", "checkpoint")
    with Refusing(
        f"checkpoint={config.checkpoint}: {MANIFEST} must be as train writes it, got an error at"
    ):
        lora = trained_lora(manifest)
        Vocab.from_json(manifest["vocab"])
        _ = [manifest[name] for name in FACTS]
    keep_adapter = keeps_adapter(config, lora)
    settled = replace(
        config,
        lora=("kept" if keep_adapter else "merged") if lora.rank else None,
        chat_template=_template_hash(config.chat_template),
    )
    origin = made_from(settled, {"checkpoint": config.checkpoint}, ignore=CHANGEABLE)
    finished = is_finished(config.out, "model", origin)
    # Imported late: errors in the settings appear before PyTorch and Transformers are loaded.
    from train.export.publish import check_publication, publish, track

    check_publication(config, finished=finished)
    if not finished:  # the checkpoints of a finished export may be gone
        write(config, origin, keep_adapter=keep_adapter)
    elif not (config.report or config.push or config.artifact):
        print_line(f"export: {config.out} is finished: nothing to do")
    publish(config, manifest)
    if config.tracker.mode != "disabled" and (config.artifact or not finished):
        track(config)


def write(
    config: ExportConfig, origin: Mapping[str, Any], *, keep_adapter: bool
) -> None:
    """Write the model directory, complete and verified, or nothing."""
    import torch

    from train.export.card import render_card, write_card
    from train.export.ngram_weights import fit_directory
    from train.export.sidecars import ADAPTIVE, write_custom_generate, write_sidecars
    from train.export.trained import check_trained, open_trained
    from train.export.verify import verify
    from train.export.weights import return_large_blocks, write_weights
    from train.lora import PlainWeights

    return_large_blocks()
    trained = open_trained(config.checkpoint, keep_adapter=keep_adapter)
    check_trained(trained)
    data = None
    if config.verify:
        _ = trained.validation  # raises before anything is written
        data = trained.shards(config.data.path)
    manifest = trained.manifest
    step = trained.checkpoint.step
    dtype = getattr(torch, config.dtype)
    verified = None
    fit = None
    windows: list[Any] = []
    with staged(config.out) as out:
        template = config.chat_template
        write_sidecars(
            trained.folder,
            out,
            manifest,
            step=step,
            dtype=dtype,
            chat_template=template,
        )
        weights = trained.served_weights(dtype)
        indexed = trained.table is not None
        if isinstance(weights, PlainWeights) and keep_adapter:
            weights.save_adapter(out / "adapter")
        write_weights(
            trained.config,
            weights,
            out,
            dtype=dtype,
            shard_size=config.shard_size,
            indexed=indexed,
        )
        if trained.table:
            shutil.copyfile(trained.table, out / TABLE)
        if data:
            verified, windows = verify(
                out, trained, data, dtype=dtype, sequences=config.verify_sequences
            )
        if (out / ADAPTIVE).is_file():
            fit = fit_directory(out, windows)
        write_custom_generate(out)
        if verified and fit:
            verified = replace(verified, drafts=fit.accepted)
        comparison = asdict(verified) if verified else None
        write_card(
            out,
            render_card(
                out, manifest, step=step, verified=comparison, push=config.push
            ),
        )
        write_manifest(
            out,
            "model",
            origin,
            parameters=manifest["parameters"],
            step=step,
            verified=comparison,
            ngrams=fingerprint_file(out / TABLE) if trained.table else None,
            decontaminated=(manifest.get("data") or {}).get("decontaminated"),
        )
    print_line(
        f"export: wrote {config.out} ({manifest['parameters'] / 1e6:.1f}M parameters, {config.dtype})"
    )
    print_line(f"export: {verified.describe() if verified else 'not verified'}")
    if fit:
        print_line(f"export: {fit.describe()}")


def _template_hash(path: str | None) -> str | None:
    if path is not None and not Path(path).is_file():
        raise UserError(
            f"chat_template must be a file, got {path}. Give the path of a Jinja template."
        )
    return fingerprint_file(Path(path)) if path else None


if __name__ == "__main__":
    run("export", ExportConfig, main)
