"""What is refused before a run begins: settings, shards, model and machine that do not fit each other."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf import RankLocalError, UserError
from conf.dtype import AUTO
from conf.errors import MEMORY
from conf.fingerprint import fingerprint_file
from conf.stage import read_manifest
from data_prep.ngrams import find_table
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab
from train.config import ObjectiveConfig, TrainConfig
from train.memory import GIB, RESERVED, Memory, estimate_memory, machine_memory
from train.pretrained import check_architecture, check_tokenizer, model_config

SAMPLE = 64  # sequences that are searched for adaptive ids; training checks every batch


def check_start(config: TrainConfig, data: dict[str, Any]) -> None:
    """Raise UserError unless settings, shards (`data`, their manifest), model and machine fit each other."""
    vocab = Vocab.from_json(data["vocab"])
    folder = Path(config.data.path)
    architecture = model_config(config.model, vocab=vocab)
    check_architecture(architecture, seq_len=data["seq_len"])
    check_tokenizer(config.model, config.data.path)
    find_table(
        folder,
        vocabulary=vocab.text_size,
        tokenizer=folder / TOKENIZER / "tokenizer.json",
    )
    check_adaptive(config.data.path, vocab, config.objective)
    if config.data.own:
        check_own(config.data.own, config.data.path, data)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config.accumulations(ranks)
    check_devices()
    if config.memory_check:
        architecture.vocab_size = max(architecture.vocab_size, vocab.size)
        cuda = torch.cuda.is_available()
        if config.dtype == AUTO and not cuda:
            config = replace(
                config, dtype="float32"
            )  # the smaller of the two, to refuse nothing that fits
        memory = estimate_memory(
            architecture, config, ranks=ranks, seq_len=data["seq_len"], cuda=cuda
        )
        check_memory(memory, cuda=cuda)


def check_own(own: str, path: str, data: Mapping[str, Any]) -> None:
    """Raise UserError unless the model's own text has tokenizer, vocabulary and seq_len of the data at `path`.

    `data` is that data's manifest.
    """
    manifest = read_manifest(own, "shards", "data.own")
    cure = (
        f"Prepare it by python -m data_prep experiment=own tokenizer={path}/{TOKENIZER}"
    )
    if manifest["seq_len"] != data["seq_len"]:
        raise UserError(
            f"data.own={own} must have seq_len={data['seq_len']} like data.path, got {manifest['seq_len']}. "
            f"{cure} seq_len={data['seq_len']}"
        )
    files = [
        fingerprint_file(Path(folder) / TOKENIZER / "tokenizer.json")
        for folder in (own, path)
    ]
    if files[0] != files[1]:
        raise UserError(
            f"data.own={own} must have the tokenizer of data.path={path}, got another tokenizer.json. {cure}"
        )
    for name, value in data["vocab"].items():
        if manifest["vocab"].get(name) != value:
            raise UserError(
                f"data.own={own} must have the vocabulary of data.path, got {manifest['vocab'].get(name)} for "
                f"vocab.{name}={value}. {cure} with the vocab= of data.path"
            )
    if not manifest["train"]["shards"]:
        raise UserError(
            f"data.own={own} must have training sequences, got none. {cure} held_out=0"
        )


def check_devices() -> None:
    """Raise RankLocalError on a rank for which the machine has no GPU, if it has any."""
    gpus = torch.cuda.device_count()
    if gpus and int(os.environ.get("LOCAL_RANK", "0")) >= gpus:
        raise RankLocalError(
            f"torchrun must start at most one process for each GPU of a machine, got {gpus} GPUs"
        )


def check_ranks(settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError unless all ranks have the same settings.

    Machines may have different versions of the project, and ranks that save at different steps wait forever.
    """
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other.get(name) != value:
                raise UserError(
                    f"{name} must be the same on every rank, got {value} on rank 0 and {other.get(name)} on "
                    f"rank {rank}"
                )


def check_memory(memory: Memory, *, cuda: bool) -> None:
    """Raise UserError if the rank's GPU, or the machine of all local ranks, is too small."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machine = machine_memory()
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    if cuda:
        gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        _check_fits(
            memory.total, gpu.total_memory - RESERVED, memory.moment, largest, "GPU"
        )
        _check_fits(
            ranks * memory.loading,
            machine,
            f"loading the model by {ranks} ranks",
            "weights",
            "machine",
        )
        _check_fits(
            ranks * memory.host,
            machine,
            "all ranks' states",
            "offloaded states",
            "machine",
        )
    else:
        _check_fits(
            ranks * (memory.total + memory.host),
            machine,
            memory.moment,
            largest,
            "machine",
        )


def _check_fits(
    needed: float, capacity: float, moment: str, largest: str, place: str
) -> None:
    if needed > capacity:
        raise UserError(
            f"memory must suffice for {moment}: it needs {needed / GIB:.1f} GiB, most of it {largest}, "
            f"got {capacity / GIB:.1f} GiB of this {place}. plan=true shows all parts; memory_check=false "
            "trains anyway",
            page=MEMORY,
        )


def check_adaptive(path: str, vocab: Vocab, objective: ObjectiveConfig) -> None:
    """Raise UserError unless the adaptive ids are distinct, enough, and in no text of the shards."""
    if objective.name == "causal":
        return
    ids = vocab.adaptive
    distinct = len(set(ids)) == len(ids) and vocab.sentinels.isdisjoint(ids)
    if not distinct or not all(0 <= id < vocab.size for id in ids):
        raise UserError(
            f"data.path={path}: adaptive ids must be below {vocab.size}, each once and none of a control "
            f"piece, got {list(ids)}"
        )
    try:
        used = objective.adaptive_ids(ids)
    except ValueError as error:
        raise UserError(str(error)) from error
    shards = Shards(path, "train")
    for index in np.linspace(
        0, len(shards) - 1, min(SAMPLE, len(shards)), dtype=np.int64
    ):
        common = np.intersect1d(shards[int(index)].tokens, used)
        if len(common):
            raise UserError(
                f"data.path={path}: no text may produce an adaptive id, got {common[0]} in the text of "
                f"sequence {index}"
            )
