"""python -m train.export: a training folder in, a plain Transformers directory out.

model.safetensors, config.json, generation_config.json, tokenizer files
adapter/           with lora=kept, as peft reads it; the weights beside it are the base model's
README.md          the model card; with report=DIR also what was measured of the directory
adaptive.json      adaptive and control ids, L, provenance: absent for a model without adaptive tokens
manifest.json      written last
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from conf import UserError, run
from conf.stage import is_finished, made_from, read_manifest, staged, write_manifest
from train.checkpoint import find_whole, list_checkpoints
from train.export.adapter import keeps_adapter, trained_lora
from train.export.beside import write_beside
from train.export.card import write_card
from train.export.config import ExportConfig
from train.export.publish import check_asked, publish
from train.lora import plain_weights
from train.partitions import full_weights


def main(config: ExportConfig) -> None:
    """Export, unless the folder already holds it; nothing is visible before it is whole."""
    manifest = read_manifest(config.checkpoint, "checkpoint", "checkpoint")
    kept = keeps_adapter(config, trained_lora(manifest))
    made = made_from(config, {"checkpoint": config.checkpoint}, ignore=("report", "push", "private"))
    finished = is_finished(config.out, "model", made)
    check_asked(config, finished=finished)
    if finished:
        if not (config.report or config.push):
            print(f"export: {config.out} is finished: nothing to do")
        publish(config, manifest)
        return
    with staged(config.out) as out:
        export(Path(config.checkpoint), out, manifest, dtype=getattr(torch, config.dtype), kept=kept)
        write_card(out, manifest, verified=None, push=config.push)
        write_manifest(out, "model", made, parameters=manifest["parameters"])
    print(f"export: wrote {config.out} ({manifest['parameters'] / 1e6:.1f}M parameters, {config.dtype})")
    publish(config, manifest)


def export(
    checkpoint: Path, out: Path, manifest: dict[str, Any], *, dtype: torch.dtype, kept: bool = False
) -> None:
    """Write the Transformers directory of a finished training folder, of its newest whole checkpoint."""
    found, broken = find_whole(list_checkpoints(checkpoint / "checkpoints"))
    if found is None:
        raise UserError(f"checkpoint={checkpoint}: wanted a folder with checkpoints, found none")
    for folder, why in broken.items():
        print(f"export: {folder} is broken ({why}): {found.name} is taken")
    config = AutoConfig.from_pretrained(checkpoint / "model", local_files_only=True)
    config.dtype = dtype
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    # "lm." is the place of the library's model within train.lm.AdaptiveLM.
    trained = full_weights(checkpoint / "checkpoints" / found.name)
    weights = {name.removeprefix("lm."): tensor for name, tensor in trained.items()}
    lora = trained_lora(manifest)
    if lora.rank:
        keep = out / "adapter" if kept else None
        weights = plain_weights(lm, lora, weights, adaptive=manifest["adaptive"], keep=keep, dtype=dtype)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    logging.disable_progress_bar()
    lm.save_pretrained(out, state_dict=weights)
    write_beside(checkpoint, out, manifest, step=found.step, dtype=dtype)


if __name__ == "__main__":
    run("export", ExportConfig, main)
