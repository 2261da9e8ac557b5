"""python -m train.export: a training folder in, a plain Transformers directory out.

model.safetensors, config.json, generation_config.json, tokenizer files; weights of more than shard_size in
                   model-00001-of-0000N.safetensors with model.safetensors.index.json
adapter/           with lora=kept, as peft reads it; the weights beside it are the base model's
custom_generate/   the decoder, for those who have Transformers alone
chat_template.jinja  the base tokenizer's, or a plain one
README.md          the model card; with report=DIR also what was measured of the directory
ngrams.safetensors the n-gram table of the training data, where they had one; then model.safetensors
                   has an index too, by which servers know what is no weight
adaptive.json      adaptive and control ids, L, provenance: absent for a model without adaptive tokens
manifest.json      written last
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf import UserError, run
from conf.console import print_line
from conf.errors import Refusing
from conf.fingerprint import fingerprint_file
from conf.stage import MANIFEST, is_finished, made_from, read_manifest
from data_prep.vocab import Vocab
from train.export.adapter import keeps_adapter, trained_lora
from train.export.config import ExportConfig
from train.export.malloc import return_large_blocks

# What the manifest of a training says, of what an export needs
FACTS = {
    "settings": dict,
    "vocab": dict,
    "adaptive": list,
    "L": int,
    "validation": list,
    "inputs": dict,
    "step": int,
    "commit": str,
}
# What says where things are, how much of them is looked at or what becomes of the result: it is the same.
CHANGEABLE = ("data", "verify_sequences", "report", "push", "private", "tracker", "artifact")


def main(config: ExportConfig) -> None:
    """Export, unless the folder already holds it; nothing is visible before it is whole and verified."""
    return_large_blocks()
    manifest = read_manifest(config.checkpoint, "checkpoint", "checkpoint")
    _check_manifest(config.checkpoint, manifest)
    lora = trained_lora(manifest)
    kept = keeps_adapter(config, lora)
    settled = replace(
        config,
        lora=("kept" if kept else "merged") if lora.rank else None,
        chat_template=_template_hash(config.chat_template),
    )
    made = made_from(settled, {"checkpoint": config.checkpoint}, ignore=CHANGEABLE)
    finished = is_finished(config.out, "model", made)
    # Imported late: a mistake in the settings is told without waiting for PyTorch and Transformers.
    from train.export.publish import check_asked, publish, track

    check_asked(config, manifest, finished=finished)
    if not finished:  # only then are checkpoints read, which may be large, or gone since
        from train.export.checks import check_described
        from train.export.directory import write
        from train.export.trained import open_trained

        trained = open_trained(config.checkpoint)
        check_described(trained)
        write(config, trained, made, kept=kept)
    elif not (config.report or config.push or config.artifact):
        print_line(f"export: {config.out} is finished: nothing to do")
    publish(config, manifest)
    if config.tracker.mode != "disabled" and (config.artifact or not finished):
        track(config)


def _template_hash(path: str | None) -> str | None:
    """Return the SHA-256 of the chat template: what it says counts, not where it lies."""
    if path is None:
        return None
    if not Path(path).is_file():
        raise UserError(
            f"chat_template must be a file, got {path}, which is none. Give a Jinja template's path."
        )
    return fingerprint_file(Path(path))


def _check_manifest(folder: str, manifest: Mapping[str, Any]) -> None:
    """Raises UserError for a manifest that no training wrote: the folder may come from anywhere."""
    for name, kind in FACTS.items():
        if not isinstance(manifest.get(name), kind):
            raise UserError(
                f"checkpoint={folder}: {MANIFEST} must have {name} of type {kind.__name__}, got "
                f"{manifest.get(name)}. Export a folder that train wrote."
            )
    with Refusing(f"checkpoint={folder}: {MANIFEST} must be of a training, got"):
        trained_lora(dict(manifest))
        Vocab.from_json(manifest["vocab"])


if __name__ == "__main__":
    run("export", ExportConfig, main)
