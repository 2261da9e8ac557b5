"""Check before a run that its settings, shards, model and machine fit each other."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.console import torchrun_rank
from conf.devices.dtype import AUTO, cpu_has_bfloat16
from conf.devices.memory import check_fits, machine_memory
from conf.errors import RankLocalError, UserError, counted
from conf.runs.fingerprint import fingerprint_file
from conf.runs.tensorboard import check_installed
from conf.runs.tracker import TENSORBOARD
from data_prep.ngrams import find_table
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab
from train.config import ObjectiveConfig, TrainConfig
from train.inputs import RunInputs
from train.pretrained import check_tokenizer
from train.spec import RESERVED, Memory, ModelSpec, estimate_memory

SAMPLE = 64  # number of sequences that are searched for adaptive ids
CURE = (
    "choose a smaller model or batch: plan=true shows all parts; "
    "memory_check=false trains anyway"
)


def check_start(config: TrainConfig, inputs: RunInputs, spec: ModelSpec) -> None:
    """Check data, ranks and machine; raise UserError for the first check that fails."""
    if config.tracker.mode == TENSORBOARD:
        check_installed()
    vocab = inputs.vocab
    folder = Path(config.data.path)
    tokenizer = folder / TOKENIZER / "tokenizer.json"
    check_tokenizer(config.model, config.data.path)
    find_table(folder, vocabulary=vocab.text_size, tokenizer=tokenizer)
    check_adaptive(config.data.path, vocab, config.objective)
    if not inputs.data["held_out"]["sequences"]:
        raise UserError(
            f"data.path={folder} must have held-out sequences for validation, got none. "
            "Prepare it with a larger held_out."
        )
    if inputs.own:
        check_own_text(inputs)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # the engine reads it too
    config.accumulations(ranks)
    check_devices()
    if config.memory_check:
        if config.dtype == AUTO and not torch.cuda.is_available():
            dtype = "bfloat16" if cpu_has_bfloat16() else "float32"
            config = replace(config, dtype=dtype)
        check_memory(estimate_memory(spec, config, ranks=ranks))


def check_own_text(inputs: RunInputs) -> None:
    """Raise UserError unless the shards of data.own have the same token ids as data.path's."""
    assert inputs.own is not None
    own = inputs.folders["data.own"]
    expected = _id_facts(inputs.data, inputs.folders["data.path"])
    values = _id_facts(inputs.own, own)
    for name, value in expected.items():
        if values.get(name) != value:
            raise UserError(
                f"data.own={own} must have {name}={value} like data.path, "
                f"got {values.get(name)}. Prepare it with experiment=own and the "
                "tokenizer, vocab= and seq_len of data.path."
            )


def _id_facts(manifest: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the facts of shards that determine the meaning of token ids, by name."""
    tokenizer = fingerprint_file(Path(folder) / TOKENIZER / "tokenizer.json")
    facts = {"seq_len": manifest["seq_len"], "tokenizer.json": tokenizer}
    return {**facts, **Vocab.from_json(manifest["vocab"]).to_json()}


def check_devices() -> None:
    """Raise RankLocalError if this machine has GPUs, but fewer than local ranks."""
    gpus = torch.cuda.device_count()
    if gpus and torchrun_rank()[2] >= gpus:
        raise RankLocalError(
            f"torchrun must start at most one process for each GPU, got {counted(gpus, 'GPU')}. "
            "Lower --nproc_per_node."
        )


def check_ranks(settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError unless all ranks have the same settings.

    Otherwise ranks that save at different steps would wait for each other forever.
    """
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other.get(name) != value:
                raise UserError(
                    f"{name} must be the same on every rank, got {value} on rank 0 "
                    f"and {other.get(name)} on rank {rank}. "
                    "Start all ranks with the same settings."
                )


def check_memory(memory: Memory) -> None:
    """Raise UserError if this rank's GPU or its machine has too little free memory.

    The machine must suffice for all its local ranks. All ranks check before any rank
    loads the model: a collective comes in between.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machine = machine_memory(swap=True)
    needs: list[tuple[str, float, tuple[float, float], str]]
    needs = [("a step", ranks * (memory.total + memory.host), machine, "machine")]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(torchrun_rank()[2])
        usable = total - RESERVED
        needs = [
            ("a step", memory.total, (min(free, usable), usable), "GPU"),
            ("loading the model", ranks * memory.loading, machine, "machine"),
            ("offloaded states", ranks * memory.host, machine, "machine"),
        ]
    for purpose, needed, capacity, holder in needs:
        check_fits(purpose, needed, capacity, holder, CURE)


def check_adaptive(path: str, vocab: Vocab, objective: ObjectiveConfig) -> None:
    """Raise UserError if a text contains an adaptive id.

    It searches at most SAMPLE sequences of the shards in the folder `path`.
    """
    ids = objective.adaptive_ids(vocab.adaptive)
    shards = Shards(path, "train")
    sample = np.linspace(0, len(shards) - 1, min(SAMPLE, len(shards)), dtype=np.int64)
    for index in sample.tolist():
        common = np.intersect1d(shards[index].tokens, ids)
        if len(common):
            raise UserError(
                f"data.path={path}: text must not contain an adaptive id, "
                f"got {common[0]} in the text of sequence {index}. "
                "Prepare the data with other ids in vocab.adaptive."
            )
