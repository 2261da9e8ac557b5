"""One rank of test_parallel.py: decode and print the texts as JSON."""

import json
import sys
from functools import partial

import torch

from conf import settings
from infer import DecodeConfig, generate, load
from infer.__main__ import main
from infer.config import InferConfig
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.policy import MeasuredPolicy, prior_costs
from infer.drafters.stopwatch import Stopwatch
from infer.engine.output import Request
from infer.engine.sampling import GREEDY, Sampling
from infer.models import parallel
from infer.models.checkpoint import ModelDirectory
from tests.infer.library import collect, steps_of

MEASURED = 12  # tokens by a measured budget, whose trees are large
PROMPTS = [[5, 17, 3, 88, 41], [44, 6, 13]]
DRAFTED = partial(DecodeConfig, max_new_tokens=24, nodes=8, theta_prob=0.01)
DRAFTING = {
    "ssd": DRAFTED("ssd"),
    "gsd": DRAFTED("gsd"),
    "gsd by ratio": DRAFTED("gsd", temperature=0.8, verify="ratio"),
    "gsd, measured": DecodeConfig("gsd", max_new_tokens=MEASURED),
}
GATED = DecodeConfig(probes="all", k=3, sources=["adaptive"], max_new_tokens=24)
Texts = tuple[list[list[int]], list[int]]


def device() -> str | None:
    return "cpu" if parallel.processes() == 1 else None


def texts(lm, policy, sampling: Sampling, *, static: bool = False) -> list[list[int]]:
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    new = partial(AdaptiveDrafter, [90], policy, stopwatch=Stopwatch(lm))
    steps = steps_of(lm, new, requests, sampling, tokens=24, static=static)
    return collect(steps, 2)[0]


def by_steps(folder: str, methods: dict[str, DecodeConfig], draft: str | None) -> dict:
    """Return texts by method, and the accepted drafts of each step of a fixed budget."""
    model = load(folder, "float32", device(), draft=draft)
    if model.draft and draft != "self:1" and (rank := parallel.place()[0]):
        torch.manual_seed(rank)  # ranks other than 0 draft badly
        for parameter in model.draft.lm.parameters():
            parameter.data += torch.randn_like(parameter)
    result = {}
    for name, config in methods.items():
        steps = list(generate(model, PROMPTS, config))
        accepted = [step.accepted for step in steps]
        fixed = config.nodes or config.k
        result[name] = [collect([steps], 2)[0], accepted if fixed else None]
    return result


def outputs(folder: str) -> dict[str, object]:
    lm = ModelDirectory(folder).load(dtype="float32", device=device())
    tree = FixedPolicy(3, "all", nodes=6, width=3)
    sampled = Sampling(0.8, top_k=10)
    auto = MeasuredPolicy(prior_costs("cpu"), 3)
    return {
        "greedy": texts(lm, tree, GREEDY),
        "sampled": texts(lm, tree, sampled),
        "fixed shapes": texts(lm, tree, sampled, static=True),
        "auto": texts(lm, auto, GREEDY),
        "drafted": {
            draft: by_steps(folder, DRAFTING, draft)
            for draft in (f"{folder}/draft", "self:1")
        },
        "gated": by_steps(f"{folder}/gated", {"adaptive": GATED}, None),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = outputs(sys.argv[1])
    if parallel.is_first():
        print(json.dumps(result))
    command = [f"model={sys.argv[1]}", "prompt=5 17 3", "dtype=float32", "decode=plain"]
    main(settings("infer", InferConfig, [*command, "decode.max_new_tokens=4"]))
