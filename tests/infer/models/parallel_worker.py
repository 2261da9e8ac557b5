"""One rank of test_parallel.py: decode, and tell what came out."""

import json
import sys
from functools import partial

import torch

from conf import settings
from infer.__main__ import main
from infer.config import InferConfig
from infer.drafters import costs
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.auto import AutoPolicy
from infer.drafters.protocol import Each
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Limits, decode
from infer.models import parallel
from infer.models.checkpoint import load_model

PROMPTS = [[5, 17, 3, 88, 41], [44, 6, 13]]


def texts(lm, policy, *, static: bool, sampling: Sampling) -> list[list[int]]:
    runner = Runner(lm, capacity=64, max_rows=policy.max_rows, batch=2, static=static)
    found: list[list[int]] = [[] for _ in PROMPTS]
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    new = partial(AdaptiveDrafter, [90], policy)
    for steps in decode(runner, requests, Each(new), Limits(24, eos=[1]), sampling):
        for step in steps:
            found[step.sequence] += step.tokens
    return found


def outputs(folder: str) -> dict[str, object]:
    ranks = parallel.processes()
    lm = load_model(folder, dtype="float32", device="cpu" if ranks == 1 else None)
    runner = Runner(lm, capacity=8, max_rows=1)
    assert runner._target.cache._kv.shape[3] == lm.config.num_key_value_heads // ranks
    tree, sampled = FixedPolicy(3, "all", nodes=6, width=3), Sampling(0.8, top_k=10)
    costs.SECONDS, costs.ROWS = 0.05, (1, 2, 4, 8)
    auto = AutoPolicy(costs.measure_costs(lm, batch=2, context=32, sampling=Sampling()), 3)
    return {
        "greedy": texts(lm, tree, static=False, sampling=Sampling()),
        "sampled": texts(lm, tree, static=False, sampling=sampled),
        "fixed shapes": texts(lm, tree, static=True, sampling=sampled),
        "auto": texts(lm, auto, static=False, sampling=Sampling()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = outputs(sys.argv[1])
    if parallel.is_first():
        print(json.dumps(found))
    command = [f"model={sys.argv[1]}", "prompt=5 17 3", "dtype=float32", "decode=plain"]
    main(settings("infer", InferConfig, [*command, "decode.max_new_tokens=4"]))
