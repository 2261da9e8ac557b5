"""One rank of test_parallel.py: decode and print the texts as JSON."""

import json
import sys
from functools import partial

import torch

from conf.console import torchrun_rank
from conf.settings.compose import settings
from infer import DecodeConfig, generate, load
from infer.__main__ import main
from infer.config import InferConfig
from infer.models import parallel
from tests.infer.library import collect

PROMPTS = [[5, 17, 3, 88, 41], [44, 6, 13]]
decode = partial(DecodeConfig, max_new_tokens=16)
ADAPTIVE = partial(decode, k=3, probes="all", sources=["adaptive"])
GRAPHS = partial(decode, "gsd", nodes=8, theta_prob=0.01)
METHODS = {
    "plain": decode("plain"),
    "adaptive": ADAPTIVE(),
    "adaptive, sampled": ADAPTIVE(temperature=0.8, top_k=10),
    "measured": decode(),
}
DRAFTED_METHODS = {
    "graphs": GRAPHS(),
    "graphs, sampled by ratio": GRAPHS(temperature=0.8, verify="ratio"),
    "graphs, measured": decode("gsd"),
}


def outputs(folder: str) -> dict[str, list[object]]:
    """Return each method's texts, and accepted drafts by step if no clock decides."""
    device = "cpu" if parallel.processes() == 1 else None
    result = {}
    for draft in (None, f"{folder}/draft", "self:1"):
        model = load(folder, "float32", device, draft=draft)
        if draft and draft != "self:1" and (rank := torchrun_rank()[0]):
            torch.manual_seed(rank)  # ranks other than 0 draft badly
            for parameter in model.draft.lm.parameters():
                parameter.data += torch.randn_like(parameter)
        for name, config in (DRAFTED_METHODS if draft else METHODS).items():
            steps = list(generate(model, PROMPTS, config))
            accepted = [step.accepted for step in steps]
            measured = "measured" in name or name == "plain"
            texts = collect([steps], 2)[0]
            result[f"{name}, {draft}"] = [texts, None if measured else accepted]
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = outputs(sys.argv[1])
    if not torchrun_rank()[0]:
        print(json.dumps(result))
    command = [f"model={sys.argv[1]}", "prompt=5 17 3", "dtype=float32", "decode=plain"]
    main(settings("infer", InferConfig, [*command, "decode.max_new_tokens=4"]))
