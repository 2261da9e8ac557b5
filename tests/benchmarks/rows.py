"""What a forward of q rows costs beside one of a single row: L(q) / L(1), side by side in one run.

    python -m tests.benchmarks.rows [hidden layers vocab]

Random weights of a Llama shape (the demo's where none is given), one thread, 256 tokens in the
cache. The forwards of all q take turns, so that a change of the machine's speed meets them alike.
"""

import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree

ROWS = (1, 2, 3, 4, 5, 6, 8, 16)


def main(hidden: int = 256, layers: int = 3, vocab: int = 512, turns: int = 200) -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        vocab_size=vocab,
    )
    for dtype in (torch.bfloat16, torch.float32):
        lm = LlamaForCausalLM._from_config(config).to(dtype).eval()
        runner = Runner(lm, capacity=512, max_rows=32)
        runner._forward._least = 1  # the single row as it is
        runner.prefill([list(range(256))])
        times: dict[int, list[float]] = {q: [] for q in ROWS}
        for turn in range(turns + 10):
            for q in ROWS:
                began = time.perf_counter()
                runner.forward([Tree.chain(5, list(range(q - 1)))], [Request([5])], GREEDY)
                if turn >= 10:
                    times[q].append(time.perf_counter() - began)
        medians = {q: statistics.median(found) for q, found in times.items()}
        ratios = "  ".join(f"{q}: {medians[q] / medians[1]:.2f}" for q in ROWS)
        print(f"{dtype}  L(1) {1000 * medians[1]:.2f} ms  L(q)/L(1)  {ratios}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
