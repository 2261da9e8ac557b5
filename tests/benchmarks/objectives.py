"""Measure the time of a training step for each objective, relative to `causal`.

    python -m tests.benchmarks.objectives [--rounds 10]

The model is a Llama of 30M parameters with random weights; a step has two sequences of 1,024
tokens, L = 5, in float32 on one thread: layout, forward, loss, backward and AdamW. The
objectives take turns; a ratio is the median of the ratios within a round. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from tests.benchmarks.shapes import random_llama
from tests.conftest import text_vocab
from train.attention import register
from train.config import ObjectiveConfig
from train.data import lay_out, to_tensors
from train.model import AdaptiveLM

TOKENS = 1024
SEQUENCES = 2
L = 5
VOCAB = text_vocab(4096, 3)
OBJECTIVES = ("causal", "basic", "dual", "branch")


def step_of(objective: str) -> Callable[[int], None]:
    """Return a function that takes one optimizer step; its argument seeds the windows."""
    torch.manual_seed(0)
    lm = random_llama("30M", "float32")
    lm.set_attn_implementation(register("sdpa"))
    module = AdaptiveLM(lm, chunk=1024, L=L)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    tokens = torch.randint(10, VOCAB.size, (SEQUENCES, TOKENS)).numpy()
    documents = np.zeros(TOKENS, dtype=np.int64)
    sequences = [SimpleNamespace(tokens=row, documents=documents) for row in tokens]
    settings = ObjectiveConfig(name=objective, L=L)

    def step(seed: int) -> None:
        layout = lay_out(sequences, range(SEQUENCES), VOCAB, settings, seed=(seed,))
        loss, *_ = module(**to_tensors(layout, torch.device("cpu")))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = {name: step_of(name) for name in OBJECTIVES}
    seconds: dict[str, list[float]] = {name: [] for name in OBJECTIVES}
    for round_ in range(1 + args.rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step(round_)
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    ratios = {}
    for name, values in seconds.items():
        rounds = [value / base for value, base in zip(values, seconds["causal"])]
        ratios[name] = {"median": median(rounds), "range": [min(rounds), max(rounds)]}
        print(f"{name:8} {median(values):.2f} s, relative to causal {ratios[name]}")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
