"""One rank of test_parallel.py: decode, and tell what came out."""

import json
import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from conf import UserError, settings
from infer import DecodeConfig, generate, load
from infer.__main__ import main
from infer.config import InferConfig
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.policy import MeasuredPolicy, prior_costs
from infer.drafters.stopwatch import Stopwatch
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafters, Limits, decode
from infer.models import parallel
from infer.models.checkpoint import ModelDirectory

MEASURED = 12  # tokens by a measured budget, whose trees are large
PROMPTS = [[5, 17, 3, 88, 41], [44, 6, 13]]
DRAFTED = {"max_new_tokens": 24, "nodes": 8, "theta_prob": 0.01}
DRAFTING = {
    "ssd": DecodeConfig(method="ssd", **DRAFTED),
    "gsd": DecodeConfig(method="gsd", **DRAFTED),
    "gsd sampled": DecodeConfig(method="gsd", temperature=0.8, **DRAFTED),
    "gsd by ratio": DecodeConfig(
        method="gsd", temperature=0.8, verify="ratio", **DRAFTED
    ),
    "gsd, measured": DecodeConfig(method="gsd", max_new_tokens=MEASURED),
}


def texts(lm, policy, *, static: bool, sampling: Sampling) -> list[list[int]]:
    runner = Runner(lm, capacity=64, max_rows=policy.max_rows, batch=2, static=static)
    result: list[list[int]] = [[] for _ in PROMPTS]
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    new = partial(AdaptiveDrafter, [90], policy, stopwatch=Stopwatch(lm))
    for steps in decode(runner, requests, Drafters(new), Limits(24, eos=[1]), sampling):
        for step in steps:
            result[step.sequence] += step.tokens
    return result


def outputs(folder: str) -> dict[str, object]:
    ranks = parallel.processes()
    lm = ModelDirectory(folder).load(
        dtype="float32", device="cpu" if ranks == 1 else None
    )
    runner = Runner(lm, capacity=8, max_rows=1)
    assert runner._target.cache._kv.shape[3] == lm.config.num_key_value_heads // ranks
    tree, sampled = FixedPolicy(3, "all", nodes=6, width=3), Sampling(0.8, top_k=10)
    auto = MeasuredPolicy(prior_costs("cpu"), 3)
    drafted = {
        draft: drafted_texts(folder, draft) for draft in (f"{folder}/draft", "self:1")
    }
    return {
        "greedy": texts(lm, tree, static=False, sampling=Sampling()),
        "sampled": texts(lm, tree, static=False, sampling=sampled),
        "fixed shapes": texts(lm, tree, static=True, sampling=sampled),
        "auto": texts(lm, auto, static=False, sampling=Sampling()),
        "drafted": drafted,
        "gated": gated_texts(f"{folder}/gated"),
    }


def gated_texts(folder: str) -> list[object]:
    """The texts of a model with a gated adapter, and the accepted drafts of each step."""
    model = load(folder, "float32", "cpu" if parallel.processes() == 1 else None)
    steps = list(
        generate(
            model,
            PROMPTS,
            DecodeConfig(probes="all", k=3, sources=["adaptive"], max_new_tokens=24),
        )
    )
    tokens = [
        [token for step in steps if step.sequence == b for token in step.tokens]
        for b in (0, 1)
    ]
    return [tokens, [step.accepted for step in steps]]


def drafted_texts(folder: str, draft: str) -> dict[str, object]:
    """By method the texts, and of a fixed budget the accepted drafts of each step."""
    rank, ranks, _ = parallel.place()
    model = load(folder, "float32", "cpu" if ranks == 1 else None, draft=draft)
    if draft != "self:1":
        torch.manual_seed(rank)
        for parameter in model.draft.lm.parameters() if rank else ():
            parameter.data += torch.randn_like(parameter)
    result = {}
    for name, config in DRAFTING.items():
        steps = list(generate(model, PROMPTS, config))
        tokens = [
            [token for step in steps if step.sequence == b for token in step.tokens]
            for b in (0, 1)
        ]
        result[name] = [
            tokens,
            [step.accepted for step in steps] if config.nodes else None,
        ]
    return result


def refused(folder: str) -> str:
    """What this rank raises where the draft model's memory does not suffice on rank 1."""

    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    real = ModelDirectory.load

    def load_draft_fully(directory: ModelDirectory, **options: Any) -> Any:
        failing = directory.setting == "draft" and parallel.place()[0]
        return full() if failing else real(directory, **options)

    with patch.object(ModelDirectory, "load", load_draft_fully):
        try:
            load(folder, "float32", draft=f"{folder}/draft")
        except UserError as error:
            return str(error)
    return "nothing"


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = outputs(sys.argv[1]) | {"refused": refused(sys.argv[1])}
    if parallel.is_first():
        print(json.dumps(result))
    command = [f"model={sys.argv[1]}", "prompt=5 17 3", "dtype=float32", "decode=plain"]
    main(settings("infer", InferConfig, [*command, "decode.max_new_tokens=4"]))
