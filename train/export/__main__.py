"""python -m train.export: a training folder in, a plain Transformers directory out.

model.safetensors, config.json, generation_config.json, tokenizer files; weights of more than shard_size in
                   model-00001-of-0000N.safetensors with model.safetensors.index.json
adapter/           with lora=kept, as peft reads it; the weights beside it are the base model's
custom_generate/   the decoder, for those who have Transformers alone
README.md          the model card; with report=DIR also what was measured of the directory
adaptive.json      adaptive and control ids, L, provenance: absent for a model without adaptive tokens
manifest.json      written last
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf import run
from conf.stage import is_finished, made_from, read_manifest, staged, write_manifest
from train.export.adapter import keeps_adapter, trained_lora
from train.export.beside import write_beside
from train.export.bundle import write_custom_generate
from train.export.card import render_card, write_card
from train.export.config import ExportConfig
from train.export.heap import return_large_blocks
from train.export.publish import check_asked, publish
from train.export.shards import write_weights
from train.export.trained import Trained, open_trained
from train.export.verify import Verified, describe, verify
from train.model.lora import PlainWeights

# What says where things are, how much of them is looked at or what becomes of the result: it is the same.
CHANGEABLE = ("data", "verify_sequences", "report", "push", "private")


def main(config: ExportConfig) -> None:
    """Export, unless the folder already holds it; nothing is visible before it is whole and verified."""
    return_large_blocks()
    manifest = read_manifest(config.checkpoint, "checkpoint", "checkpoint")
    lora = trained_lora(manifest)
    kept = keeps_adapter(config, lora)
    settled = replace(config, lora=("kept" if kept else "merged") if lora.rank else None)
    made = made_from(settled, {"checkpoint": config.checkpoint}, ignore=CHANGEABLE)
    finished = is_finished(config.out, "model", made)
    check_asked(config, manifest, finished=finished)
    if not finished:  # only then are checkpoints read, which may be large, or gone since
        write(config, open_trained(config.checkpoint), made, kept=kept)
    elif not (config.report or config.push):
        print(f"export: {config.out} is finished: nothing to do")
    publish(config, manifest)


def write(config: ExportConfig, trained: Trained, made: Mapping[str, Any], *, kept: bool) -> None:
    """Make the directory, whole and verified, or nothing."""
    data = trained.measurable(config.data.path) if config.verify else None
    with staged(config.out) as out:
        verified = export(config, trained, out, kept=kept, data=data)
        parameters, told = trained.manifest["parameters"], asdict(verified) if verified else None
        step = trained.checkpoint.step
        write_card(out, render_card(out, trained.manifest, step=step, verified=told, push=config.push))
        write_manifest(out, "model", made, parameters=parameters, step=step, verified=told)
    print(f"export: wrote {config.out} ({parameters / 1e6:.1f}M parameters, {config.dtype})")
    print(f"export: {describe(verified) if verified else 'not verified'}")


def export(
    config: ExportConfig, trained: Trained, out: Path, *, kept: bool, data: Path | None
) -> Verified | None:
    """Write the Transformers directory of a training folder; with `data`, its shards, verify it."""
    dtype = getattr(torch, config.dtype)
    write_beside(trained.folder, out, trained.manifest, step=trained.checkpoint.step, dtype=dtype)
    weights = _plain_weights(trained, out, dtype, kept=kept)
    write_weights(trained.config, weights, out, dtype=dtype, shard_size=config.shard_size)
    write_custom_generate(out)
    if data is None:
        return None
    return verify(out, trained, data, dtype=dtype, kept=kept, sequences=config.verify_sequences)


def _plain_weights(trained: Trained, out: Path, dtype: torch.dtype, *, kept: bool) -> Mapping[str, Tensor]:
    """What is served; an adapter that is kept is written."""
    weights = trained.served_weights(dtype, kept=kept)
    if isinstance(weights, PlainWeights) and kept:
        weights.save_adapter(out / "adapter")
    return weights


if __name__ == "__main__":
    run("export", ExportConfig, main)
