"""An adapter in Uno's format, served as SGLang and vLLM do, beside our decoder.

    python -m tests.benchmarks.uno MODEL PROMPTS... [--count 100] [--new 96]

MODEL is an export with uno/ (objective.mask=noise or an id, lora.gated=true), PROMPTS are
humaneval or files of prompts. tests/uno_server.py loads MODEL/uno by peft alone and drafts
with the same noise as ours: a chain of L drafts, a tree of the likeliest nodes as our decoder
weighs them (shares among a place's 8 best tokens), and one as SGLang does (among all tokens).
One thread, float32, greedy, without the head. Prints a line of JSON for each set and shape:

    tokens_per_cycle    accepted drafts + 2: the figure that a server must reach
    ours                the same of our decoder
    equal_cycles        share of cycles in which both accepted as many drafts
    same_texts          share of texts that are plain decoding's
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conf.hub import find_folder
from infer.bench.prompts import Prompt, name_of, read_prompts
from infer.drafters.planner import FixedPlanner
from infer.engine.output import Request
from infer.engine.pick import LEADERS
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits, decode
from infer.models.checkpoint import ModelDirectory
from infer.models.gated import gate_model
from infer.trees.mask_tokens import MaskTokens
from tests.infer.library import by_tokens
from tests.uno_server import UnoServer

PROMPT_TOKENS = 256
CANDIDATES = 4
NODES = 16


def by_ours(
    runner: Runner, drafters: Drafters, prompt: Sequence[int], new: int
) -> tuple[list[int], list[int]]:
    """Return the text, and each verification's accepted drafts."""
    steps = [
        step for (step,) in decode(runner, [Request(prompt)], drafters, Limits(new))
    ]
    text = [token for step in steps for token in step.tokens]
    return text, [step.accepted for step in steps if step.drafted]


def compare(
    server: UnoServer,
    runner: Runner,
    mask: MaskTokens,
    planner: FixedPlanner,
    prompts: Sequence[Prompt],
    new: int,
) -> dict[str, float]:
    """Return the figures of a set of prompts.

    The cycles that may end a text are not compared: ours draft less there.
    """
    theirs: list[int] = []
    ours: list[int] = []
    same = []
    equal = []

    def noise(length: int, count: int) -> tuple[int, ...]:
        return mask.row(count, length=length)

    for prompt in prompts:
        plain, _ = by_ours(runner, Drafters(), prompt.ids, new)
        text, accepted = by_ours(runner, by_tokens(mask, planner), prompt.ids, new)
        served, cycles = server.generate(prompt.ids, noise, tokens=new)
        same.append(served[:new] == plain == text)
        # By the length of the text at which a cycle begins.
        mine, other = by_length(accepted), by_length(cycles)
        shared = [length for length in other if length + 2 * (2 + planner.k) <= new]
        equal += [other[length] == mine.get(length) for length in shared]
        ours += mine.values()
        theirs += other.values()
    return {
        "tokens_per_cycle": mean(theirs) + 2,
        "ours": mean(ours) + 2,
        "equal_cycles": mean(equal),
        "cycles": len(theirs),
        "same_texts": mean(same),
        "texts": len(same),
    }


def by_length(accepted: Sequence[int]) -> dict[int, int]:
    """Return accepted drafts by the length of the text before them."""
    ends = accumulate(2 + count for count in accepted)
    return dict(zip([0, *ends], accepted))


def base_of(folder: Path) -> PreTrainedModel:
    lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return lm.eval()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--new", type=int, default=96)
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = ModelDirectory(Path(find_folder(args.model)))
    adaptive = directory.need_adaptive()
    L = adaptive.L
    lm = gate_model(base_of(directory.path), directory.path / "uno")
    mask = adaptive.mask(lm.config.get_text_config().vocab_size)
    capacity = PROMPT_TOKENS + args.new + 8
    runner = Runner(lm, capacity=capacity, max_rows=1 + NODES + L)
    chain = UnoServer.load(base_of(directory.path), directory.path / "uno", rows=L + 1)
    wide = replace(chain, candidates=CANDIDATES, nodes=NODES)
    tree = FixedPlanner(L, "root", nodes=NODES - 1, width=CANDIDATES)
    shapes = {
        "chain": (chain, FixedPlanner(L, "root")),
        "tree, 8 best": (replace(wide, leaders=LEADERS), tree),
        "tree": (wide, tree),
    }
    for source in args.prompts:
        prompts = read_prompts(
            source,
            directory.text,
            directory.path,
            count=args.count,
            max_tokens=PROMPT_TOKENS,
            seed=0,
        )
        for shape, (server, planner) in shapes.items():
            row = compare(server, runner, mask, planner, prompts, args.new)
            name = {"prompts": name_of(source), "drafts": shape}
            print(json.dumps(name | row), flush=True)


if __name__ == "__main__":
    main()
