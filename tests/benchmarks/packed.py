"""Measure a forward of q rows after 256 cached tokens, with packed layers and with nn.Linear.

    python -m tests.benchmarks.packed MODEL_DIR [--dtype float32] [--threads 2] [--rounds 9]

For each q it prints the median milliseconds of a forward with nn.Linear and with packed layers,
which take turns, and both relative to a forward of one row, L(q). The last line is JSON.
"""

import argparse
import json
import time
from statistics import median

import torch
from torch import nn

from infer.engine.output import Request
from infer.engine.packed import PackedLinear
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.models.checkpoint import ModelDirectory
from infer.trees.tree import Tree

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
PROMPT = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    packed = ModelDirectory(args.model).load(dtype=args.dtype, device="cpu")
    plain = ModelDirectory(args.model).load(dtype=args.dtype, device="cpu")
    for name, module in list(plain.named_modules()):
        if type(module) is PackedLinear:
            linear = nn.Linear(1, 1, bias=False)
            linear.weight, linear.bias = module.weight, module.bias
            plain.set_submodule(name, linear)
    runners = {
        name: Runner(lm, capacity=PROMPT + 1, max_rows=max(ROWS))
        for name, lm in (("linear", plain), ("packed", packed))
    }
    request = Request(list(range(10, 10 + PROMPT)))
    for runner in runners.values():
        runner.prefill([request.prompt])
    results = []
    for q in ROWS:
        tree = Tree.chain(5, list(range(20, 19 + q)))
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for turn in range(args.rounds + 2):
            for name, runner in runners.items():
                began = time.perf_counter()
                runner.forward([tree], [request], GREEDY).chooser(0, request.prompt)(0)
                if turn >= 2:  # the first ones warm up
                    seconds[name].append(time.perf_counter() - began)
        row = {name: 1000 * median(times) for name, times in seconds.items()}
        results.append({"rows": q, **row})
        cost = {name: row[name] / results[0][name] for name in runners}
        print(
            f"q = {q:2}: linear {row['linear']:6.1f} ms, packed {row['packed']:6.1f} ms;"
            f" L(q) {cost['linear']:.2f}, {cost['packed']:.2f}",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
