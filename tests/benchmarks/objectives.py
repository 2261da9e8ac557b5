"""What a training step of each objective costs beside a step of `causal`, side by side in one run.

    python -m tests.benchmarks.objectives [--dtype float32|bfloat16] [--attention sdpa|eager] [--rounds 10]

Random weights of a Llama of 30M parameters, the same two sequences of 1,024 tokens, L = 5, one
thread: layout, forward, loss, backward and AdamW. The objectives take turns; a ratio is the median of
the ratios within a round. Then the peak of resident memory above the model and its optimizer,
each objective in a process of its own. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep.shards import SPAN, PackedSequence
from data_prep.vocab import Vocab
from tests.benchmarks.shapes import RETURN_FREED, forget_peak, resident
from train.attention import register
from train.config import ObjectiveConfig
from train.data import lay_out, to_tensors
from train.model import AdaptiveLM

N, B, L, VOCAB = 1024, 2, 5, 4096
OBJECTIVES = ("causal", "basic", "dual", "branch")


def step_of(
    objective: str, dtype: torch.dtype, attention: str
) -> Callable[[int], None]:
    """A function that does one optimizer step; its argument seeds the windows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=N,
    )
    lm = LlamaForCausalLM._from_config(
        config, attn_implementation=register(attention)
    ).to(dtype)
    module = AdaptiveLM(lm, chunk=1024, L=L)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    generator = np.random.default_rng(0)
    tokens = generator.integers(10, VOCAB, size=(B, N)).astype(np.uint16)
    span = np.zeros(1, dtype=SPAN)
    span["stop"] = N
    sequences = [
        PackedSequence(row, span, np.empty(0, dtype=np.uint8)) for row in tokens
    ]
    vocab = Vocab(
        size=VOCAB, bos=1, eos=2, pre=None, suf=None, mid=None, eot=None, adaptive=(3,)
    )
    settings = ObjectiveConfig(name=objective, L=L)

    def step(seed: int) -> None:
        layout = lay_out(sequences, range(B), vocab, settings, seed=(seed,))
        loss, *_ = module(**to_tensors(layout, torch.device("cpu")))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def times(arguments: argparse.Namespace) -> dict[str, list[float]]:
    dtype = getattr(torch, arguments.dtype)
    steps = {name: step_of(name, dtype, arguments.attention) for name in OBJECTIVES}
    result: dict[str, list[float]] = {name: [] for name in OBJECTIVES}
    for round_ in range(-1, arguments.rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step(round_ + 1)
            if round_ >= 0:  # the first round warms up
                result[name].append(time.perf_counter() - began)
    return result


def peak(name: str, arguments: argparse.Namespace) -> float:
    """MiB of resident memory that a step needs above the model and its optimizer's states."""
    command = [sys.executable, "-m", "tests.benchmarks.objectives", "--peak-of", name]
    command += ["--dtype", arguments.dtype, "--attention", arguments.attention]
    run = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | RETURN_FREED,
    )
    return float(run.stdout)


def print_peak(arguments: argparse.Namespace) -> None:
    dtype = getattr(torch, arguments.dtype)
    step = step_of(arguments.peak_of, dtype, arguments.attention)
    step(0)  # gradients and moments are there now, and freed again the activations
    held = resident("VmRSS")
    forget_peak()
    for seed in range(1, 3):
        step(seed)
    print((resident("VmHWM") - held) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "eager"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peak-of", choices=OBJECTIVES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak_of:
        print_peak(arguments)
        return
    result, rows = times(arguments), {}
    for name, seconds in result.items():
        ratios = [
            own / base for own, base in zip(seconds, result["causal"], strict=True)
        ]
        ratio = statistics.median(ratios)
        rows[name] = {
            "seconds": statistics.median(seconds),
            "ratio": ratio,
            "peak_mib": peak(name, arguments),
        }
        print(
            f"{name:8} {rows[name]['seconds']:6.2f} s a step  {ratio:.2f} x causal "
            f"(rounds {min(ratios):.2f} to {max(ratios):.2f})  "
            f"activations at most {rows[name]['peak_mib']:.0f} MiB"
        )
    print(
        json.dumps(
            {
                "dtype": arguments.dtype,
                "attention": arguments.attention,
                "objectives": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
