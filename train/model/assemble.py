"""What is trained: the library's model, loaded, adapted where LoRA is asked for, under the loss.

Knows the order in which model, ZeRO 3 and LoRA come together; knows no data and no steps.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from conf.stage import partial_of
from data_prep.vocab import TOKENIZER, Vocab
from train.config import ObjectiveConfig, TrainConfig
from train.data import adaptive_ids
from train.engine import partitions
from train.engine.ranks import every_ranks
from train.model.lm import AdaptiveLM
from train.model.lora import Gate, adapt
from train.model.pretrained import load_model
from train.objective.loss import DraftLoss


def assemble(config: TrainConfig, vocab: Vocab) -> tuple[AdaptiveLM, int]:
    """The module for the engine, and the parameters of the model itself. Called by every rank."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    with partitions.loading(config):
        lm = load_model(
            config.model,
            vocab=vocab,
            dtype=dtype,
            seed=config.seed,
            whole=partitions.whole,
            every_rank=every_ranks,
        )
    parameters = partitions.count_parameters(lm)
    if config.lora.rank:
        with partitions.whole(lm.get_input_embeddings(), lm.get_output_embeddings()):
            adapt(lm, config.lora, adaptive=adaptive_ids(vocab, config.objective), seed=config.seed)
    objective, gate = config.objective, Gate(lm) if config.lora.gated else None
    module = AdaptiveLM(
        lm,
        chunk=config.loss_chunk,
        L=objective.L,
        gate=gate,
        attention=objective.attention,
    )
    return module, parameters


def draft_loss_of(objective: ObjectiveConfig) -> DraftLoss:
    """Return how adaptive tokens learn by these settings."""
    by_place = objective.place_weights == "dynamic"
    return DraftLoss(kind=objective.draft_loss, soft=objective.soft, by_place=by_place)


def describe(lm: Any, data: Path, out: Path) -> None:
    """Write what an export needs beside the weights: the architecture and the tokenizer."""
    partial = partial_of(out)
    shutil.rmtree(partial, ignore_errors=True)
    lm.config.save_pretrained(partial)
    if lm.generation_config is not None:
        lm.generation_config.save_pretrained(partial)
    for path in (data / TOKENIZER).iterdir():
        shutil.copyfile(path, partial / path.name)  # without its mode: the data may be read-only
    out.mkdir(exist_ok=True)
    for path in partial.iterdir():  # one by one: a run that goes on has them already
        os.replace(path, out / path.name)
    partial.rmdir()
