"""What is refused before a run begins: settings, shards and a model that do not go together.

Knows manifests, configurations and the machine; loads neither weights nor the engine.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf import RankLocalError, UserError
from conf.errors import MEMORY
from conf.fingerprint import fingerprint_file
from conf.stage import read_manifest
from data_prep.ngrams import find_table
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab
from train.config import ObjectiveConfig, TrainConfig
from train.data import adaptive_ids
from train.model.families import check_family
from train.model.pretrained import check_tokenizer, model_config
from train.plan.memory import GIB, RESERVED, Memory, estimate_memory

SAMPLE = 64  # sequences that are searched for adaptive ids; training looks at every batch


def check_start(config: TrainConfig, data: dict[str, Any]) -> None:
    """Raises UserError unless settings, shards (`data`, their manifest), model and machine fit each other."""
    vocab, folder = Vocab.from_json(data["vocab"]), Path(config.data.path)
    architecture = model_config(config.model, vocab=vocab)
    check_family(architecture, seq_len=data["seq_len"])
    check_tokenizer(config.model, config.data.path)
    find_table(folder, vocabulary=vocab.text_size, tokenizer=folder / TOKENIZER / "tokenizer.json")
    check_adaptive(config.data.path, vocab, config.objective)
    if config.data.own:
        check_own(config.data.own, config.data.path, data)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config.accumulations(ranks)
    check_devices()
    if config.memory_check:
        architecture.vocab_size = max(architecture.vocab_size, vocab.size)
        cuda = torch.cuda.is_available()
        memory = estimate_memory(architecture, config, ranks=ranks, seq_len=data["seq_len"], cuda=cuda)
        check_memory(memory, cuda=cuda)


def check_own(own: str, path: str, data: Mapping[str, Any]) -> None:
    """Raises UserError unless the shards of the model's own text have the tokenizer, vocabulary and seq_len of
    those at `path`, whose manifest is `data`.
    """
    manifest = read_manifest(own, "shards", "data.own")
    prepare = f"prepare it by python -m data_prep experiment=own tokenizer={path}/{TOKENIZER}"
    if manifest["seq_len"] != data["seq_len"]:
        raise UserError(
            f"data.own={own} must have seq_len={data['seq_len']} like data.path, got {manifest['seq_len']}: "
            f"{prepare} seq_len={data['seq_len']}"
        )
    files = [fingerprint_file(Path(folder) / TOKENIZER / "tokenizer.json") for folder in (own, path)]
    if files[0] != files[1]:
        raise UserError(
            f"data.own={own} must have the tokenizer of data.path={path}, got another tokenizer.json: {prepare}"
        )
    if manifest["vocab"] != data["vocab"]:
        name = next(name for name, value in data["vocab"].items() if manifest["vocab"].get(name) != value)
        raise UserError(
            f"data.own={own} must have the vocabulary of data.path, got {manifest['vocab'].get(name)} for "
            f"vocab.{name}={data['vocab'][name]}: {prepare} with the vocab= of data.path"
        )
    if not manifest["train"]["shards"]:
        raise UserError(f"data.own={own} must have training sequences, got none: {prepare} held_out=0")


def check_devices() -> None:
    """Raises RankLocalError on a rank for which the machine has no GPU, where it has any."""
    found = torch.cuda.device_count()
    if found and int(os.environ.get("LOCAL_RANK", "0")) >= found:
        raise RankLocalError(
            f"torchrun: wanted at most as many processes on a machine as it has GPUs, found {found} of these"
        )


def check_ranks(settings: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError unless all ranks' settings, in the order of the ranks, are the same: machines may
    hold different versions of the project, and ranks that save at different steps wait for ever.
    """
    for rank, found in enumerate(settings):
        for name, value in settings[0].items():
            if found.get(name) != value:
                raise UserError(
                    f"{name}: wanted the same on every rank, found {value} on rank 0 and {found.get(name)} "
                    f"on rank {rank}"
                )


def check_memory(memory: Memory, *, cuda: bool) -> None:
    """Raises UserError when the rank's GPU, or the machine that holds all its ranks, is too small."""
    if cuda:
        place, capacity, wanted = "GPU", device_memory(), memory.total
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        place, capacity, wanted = "machine", machine_memory(), ranks * (memory.total + memory.host)
    if wanted > capacity:
        largest = max(memory.parts, key=lambda name: memory.parts[name])
        raise UserError(
            f"memory: wanted at most the {capacity / GIB:.1f} GiB of this {place}, found that {memory.moment} "
            f"needs {wanted / GIB:.1f} GiB, most of it {largest} (plan=true shows all parts; "
            "memory_check=false trains all the same)",
            page=MEMORY,
        )


def device_memory() -> float:
    """Bytes that this rank's GPU has for tensors."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.cuda.get_device_properties(index).total_memory - RESERVED


def machine_memory() -> float:
    """Bytes of the machine, or of the control group that holds this process."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))


def check_adaptive(path: str, vocab: Vocab, objective: ObjectiveConfig) -> None:
    """Raises UserError unless the adaptive ids are ids of their own, enough, and in no text of the shards."""
    if objective.name == "causal":
        return
    apart = len(set(vocab.adaptive)) == len(vocab.adaptive) and vocab.sentinels.isdisjoint(vocab.adaptive)
    if not apart or not all(0 <= id < vocab.size for id in vocab.adaptive):
        raise UserError(
            f"data.path={path}: wanted adaptive ids below {vocab.size}, each once and none of a control piece, "
            f"found {list(vocab.adaptive)}"
        )
    try:
        used = adaptive_ids(vocab, objective)
    except ValueError as error:
        raise UserError(str(error)) from error
    shards = Shards(path, "train")
    for index in np.linspace(0, len(shards) - 1, min(SAMPLE, len(shards)), dtype=np.int64):
        found = np.intersect1d(shards[int(index)].tokens, used)
        if len(found):
            raise UserError(
                f"data.path={path}: wanted adaptive ids that no text produces, found {found[0]} in the text of "
                f"sequence {index}"
            )
