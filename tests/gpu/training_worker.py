"""One rank of test_training.py: `torchrun -m tests.gpu.training_worker FOLDER TOKENS OVERRIDE ...`.

It trains random weights on random tokens, saves, takes one more step, and takes the same step
after a resume. Rank 0 prints the figures as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.settings.compose import settings
from data_prep.shards import SPAN, PackedSequence
from tests.conftest import text_vocab
from train.config import ObjectiveConfig, TrainConfig
from train.data import COLUMNS, CUDA_COLUMNS, lay_out, to_tensors
from train.engine import Engine, start
from train.model import build_module
from train.pretrained import model_config

STEPS = 4
ADAPTIVE = range(2, 9)


def random_batch(
    size: int,
    tokens: int,
    objective: ObjectiveConfig,
    device: torch.device,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the layout of one sequence of `tokens` random ids below `size`, as tensors."""
    span = np.zeros(1, dtype=SPAN)
    span["stop"] = tokens
    ids = np.random.default_rng(seed).integers(9, size, tokens)
    sequence = PackedSequence(ids, span, np.empty(0, dtype=np.uint8))
    multiple = CUDA_COLUMNS if device.type == "cuda" else COLUMNS
    return to_tensors(
        lay_out(
            [sequence],
            [0],
            text_vocab(size, *ADAPTIVE),
            objective,
            seed=(seed,),
            multiple=multiple,
        ),
        device,
    )


class Steps:
    """Takes training steps with one sequence per rank."""

    def __init__(self, tokens: int, overrides: list[str]) -> None:
        rank, ranks = start()
        self.settings = self.config_of(tokens, [f"global_batch={ranks}", *overrides])
        self.rank = rank
        self.tokens = tokens
        architecture = model_config(self.settings.model)
        self.size = architecture.vocab_size
        self.engine = Engine(
            build_module(self.settings, architecture, text_vocab(self.size, *ADAPTIVE))[
                0
            ],
            self.settings,
        )

    @staticmethod
    def config_of(tokens: int, overrides: list[str]) -> TrainConfig:
        """Return the settings of a run on random weights."""
        common = [
            "model.random_init=true",
            "micro_batch=1",
            "tracker.mode=disabled",
            f"model.shape.max_position_embeddings={max(tokens, 1024)}",
        ]
        return settings("train", TrainConfig, [*common, *overrides])

    def step(self, index: int) -> float:
        """Take a step, wait for it, and return the mean loss of all ranks."""
        seed = index * torch.distributed.get_world_size() + self.rank
        batch = random_batch(
            self.size,
            self.tokens,
            self.settings.objective,
            self.engine.device,
            seed=seed,
        )
        loss = self.engine.step([batch], 1e-4, key=(0, index))[0].mean()
        torch.distributed.all_reduce(loss)
        return float(loss) / torch.distributed.get_world_size()


def main(folder: Path, tokens: int, overrides: list[str]) -> None:
    run = Steps(tokens, overrides)
    losses = [run.step(index) for index in range(STEPS)]
    norm = run.engine.gradient_norm()
    _, failure = run.engine.save(folder, "step")
    if failure is not None:
        raise failure
    expected = run.step(STEPS)
    again = Steps(tokens, overrides)
    again.engine.load(folder, "step")
    figures = {
        "losses": losses,
        "gradient_norm": norm,
        "peak_gib": run.engine.peak_memory() / 2**30,
        "next_loss": expected,
        "resumed_loss": again.step(STEPS),
    }
    if run.rank == 0:
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
