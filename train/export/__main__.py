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

from dataclasses import replace
from pathlib import Path

from conf import UserError, run
from conf.console import print_line
from conf.errors import Refusing
from conf.fingerprint import fingerprint_file
from conf.stage import MANIFEST, is_finished, made_from, read_manifest
from data_prep.vocab import Vocab
from train.export import ExportConfig, keeps_adapter, trained_lora

FACTS = ("adaptive", "L", "validation", "inputs", "step", "commit")  # further ones that an export reads
# Settings that do not change what the directory contains.
CHANGEABLE = ("data", "verify_sequences", "report", "push", "private", "tracker", "artifact")


def main(config: ExportConfig) -> None:
    """Export, unless `out` already holds the result, and publish it as the settings ask."""
    manifest = read_manifest(config.checkpoint, "checkpoint", "checkpoint")
    with Refusing(f"checkpoint={config.checkpoint}: {MANIFEST} must be as train writes it, got an error at"):
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
        from train.export.directory import write

        write(config, origin, keep_adapter=keep_adapter)
    elif not (config.report or config.push or config.artifact):
        print_line(f"export: {config.out} is finished: nothing to do")
    publish(config, manifest)
    if config.tracker.mode != "disabled" and (config.artifact or not finished):
        track(config)


def _template_hash(path: str | None) -> str | None:
    if path is not None and not Path(path).is_file():
        raise UserError(f"chat_template must be a file, got {path}. Give the path of a Jinja template.")
    return fingerprint_file(Path(path)) if path else None


if __name__ == "__main__":
    run("export", ExportConfig, main)
