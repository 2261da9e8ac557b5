"""python -m train.export: a training folder in, a plain Transformers directory out.

model.safetensors, config.json, generation_config.json, tokenizer files; weights of more than shard_size in
                   model-00001-of-0000N.safetensors with model.safetensors.index.json
adapter/           with lora=kept, as peft reads it; the weights beside it are the base model's
adaptive.json      adaptive and control ids, L, provenance: absent for a model without adaptive tokens
manifest.json      written last
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from conf import run
from conf.stage import is_finished, made_from, staged, write_json, write_manifest
from train.export.adapter import keeps_adapter
from train.export.beside import adaptive_json
from train.export.config import ExportConfig
from train.export.heap import return_large_blocks
from train.export.shards import write_weights
from train.export.trained import Trained, open_trained
from train.export.verify import Verified, describe, verify
from train.families import skeleton
from train.lora import PlainWeights

# What says where things are, or how much of them is looked at, and changes nothing in the result.
CHANGEABLE = ("data", "verify_sequences")


def main(config: ExportConfig) -> None:
    """Export, unless the folder already holds it; nothing is visible before it is whole and verified."""
    return_large_blocks()
    trained = open_trained(config.checkpoint)
    kept = keeps_adapter(config, trained.lora)
    made = made_from(config, {"checkpoint": config.checkpoint}, ignore=CHANGEABLE)
    if is_finished(config.out, "model", made):
        print(f"export: {config.out} is finished: nothing to do")
        return
    data = trained.shards(config.data.path) if config.verify else None
    with staged(config.out) as out:
        verified = export(config, trained, out, kept=kept, data=data)
        parameters, told = trained.manifest["parameters"], verified and asdict(verified)
        write_manifest(out, "model", made, parameters=parameters, verified=told)
    print(f"export: wrote {config.out} ({parameters / 1e6:.1f}M parameters, {config.dtype})")
    print(f"export: {describe(verified) if verified else 'not verified'}")


def export(
    config: ExportConfig, trained: Trained, out: Path, *, kept: bool, data: Path | None
) -> Verified | None:
    """Write the Transformers directory of a training folder; with `data`, its shards, verify it."""
    dtype = getattr(torch, config.dtype)
    _write_beside(trained, out, dtype)
    weights = _plain_weights(trained, out, dtype, kept=kept)
    write_weights(trained.config, weights, out, dtype=dtype, shard_size=config.shard_size)
    if data is None:
        return None
    return verify(out, trained, data, dtype=dtype, kept=kept, sequences=config.verify_sequences)


def _plain_weights(trained: Trained, out: Path, dtype: torch.dtype, *, kept: bool) -> Mapping[str, Tensor]:
    """What is served: with LoRA, merged in float32, or the base model's with the adapter beside them."""
    if not trained.lora.rank:
        return trained.weights(dtype)
    weights = PlainWeights(
        skeleton(trained.config),
        trained.lora,
        trained.weights(dtype if kept else torch.float32),
        adaptive=trained.manifest["adaptive"],
        merged=not kept,
        dtype=dtype,
    )
    if kept:
        weights.save_adapter(out / "adapter")
    return weights


def _write_beside(trained: Trained, out: Path, dtype: torch.dtype) -> None:
    shutil.copytree(trained.described, out, dirs_exist_ok=True)
    config = trained.config
    config.dtype = dtype
    adaptive = adaptive_json(trained.folder, trained.manifest, step=trained.checkpoint.step)
    if adaptive and adaptive["identical"]:
        # The keys that servers with parallel drafting read.
        config.pard_token = config.ptd_token_id = adaptive["adaptive_ids"][0]
    config.save_pretrained(out)
    if adaptive:
        write_json(out / "adaptive.json", adaptive)


if __name__ == "__main__":
    run("export", ExportConfig, main)
