"""What share of the physical limit forwards of q rows reach here: a step of the loop, its picks included.

    python -m tests.benchmarks.roofline 110M [SIZE | MODEL_DIR ...]

One thread. Next to no draft is accepted of random weights, but their forwards take as long as others.
"""

import json
import statistics
import sys

import torch

from infer.drafters.costs import ROWS as MOST
from infer.measure.row_times import Bench
from infer.models.checkpoint import load_model
from infer.speed.device import measure_limit
from tests.benchmarks.shapes import SIZES, random_llama

ROWS, CONTEXT, TURNS = (1, 2, 4, 8, 16, 32, 64), 512, 9


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        for dtype in (torch.float32, torch.bfloat16):
            if name in SIZES:
                lm = random_llama(name, dtype)
            else:
                lm = load_model(name, dtype=str(dtype).removeprefix("torch."), device="cpu")
            limit = measure_limit(lm)
            assert limit is not None
            bench = Bench(lm, batch=1, context=CONTEXT)
            bench.burst(1)
            times = [[bench.burst(q) for q in ROWS] for _ in range(TURNS)]
            took = [statistics.median(column) for column in zip(*times)]
            context = CONTEXT - MOST[-1]
            shares = {q: limit.seconds(q, context) / s for q, s in zip(ROWS, took)}
            speeds = {key: value for key, value in limit.told(context).items() if key != "forward_ms"}
            print(json.dumps({"model": name, **speeds, "ms": [1e3 * s for s in took], "shares": shares}))


if __name__ == "__main__":
    main()
