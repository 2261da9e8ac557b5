"""Compare an adapter in Uno's format, drafting like SGLang and vLLM, with this project's decoder.

    python -m tests.benchmarks.uno MODEL PROMPTS... [--count 100] [--new 96]

MODEL is an export with uno/ (objective.mask=noise or an id, lora.gated=true). PROMPTS are
humaneval or files of prompts. tests/uno_server.py loads MODEL/uno with peft and drafts with the
same noise as this project: a chain of L drafts, a tree of the likeliest nodes with probabilities
over the 8 best tokens of a position (as in this project), and a tree with probabilities over all
tokens (as in SGLang). Decoding is greedy, in float32 on one thread, without the previous-token
head. The command prints a line of JSON for each prompt set and shape:

    tokens_per_cycle    accepted drafts + 2: a server must reach this figure
    project             the same for this project's decoder
    equal_cycles        share of cycles where both accept the same number of drafts
    same_texts          share of texts that equal plain decoding's
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conf.hub import find_folder
from infer.bench.prompts import name_of, read_prompts
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
from train.export.uno import CANDIDATES, NODES

PROMPT_TOKENS = 256


def by_project(
    runner: Runner, drafters: Drafters, prompt: Sequence[int], new: int
) -> tuple[list[int], list[int]]:
    """Return the text, and the number of accepted drafts in each verification."""
    steps = [
        step for (step,) in decode(runner, [Request(prompt)], drafters, Limits(new))
    ]
    text = [token for step in steps for token in step.tokens]
    return text, [step.accepted for step in steps if step.drafted]


@dataclass(frozen=True)
class Decoded:
    """A prompt's text by plain decoding, by this project, and the latter's accepted drafts."""

    prompt: Sequence[int]
    plain: list[int]
    text: list[int]
    accepted: list[int]


def compare(
    server: UnoServer, mask: MaskTokens, decoded: Sequence[Decoded], k: int, new: int
) -> dict[str, float]:
    """Return the figures of a prompt set; this project drafted with `k` rows.

    Cycles near the end of a text are not compared, since this project drafts less there.
    """
    of_server: list[int] = []
    of_project: list[int] = []
    same = []
    equal = []

    def noise(length: int, count: int) -> tuple[int, ...]:
        return mask.row(count, length=length)

    for item in decoded:
        served, cycles = server.generate(item.prompt, noise, tokens=new)
        same.append(served[:new] == item.plain == item.text)
        # Cycles correspond if the text has the same length at their start.
        project, peer = by_length(item.accepted), by_length(cycles)
        shared = [length for length in peer if length + 2 * (2 + k) <= new]
        equal += [peer[length] == project.get(length) for length in shared]
        of_project += project.values()
        of_server += peer.values()
    return {
        "tokens_per_cycle": mean(of_server) + 2,
        "project": mean(of_project) + 2,
        "equal_cycles": mean(equal),
        "cycles": len(of_server),
        "same_texts": mean(same),
        "texts": len(same),
    }


def by_length(accepted: Sequence[int]) -> dict[int, int]:
    """Return the number of accepted drafts of each cycle, by the length of the text before it."""
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
    planners = {
        "chain": FixedPlanner(L, "root"),
        "tree": FixedPlanner(L, "root", nodes=NODES - 1, width=CANDIDATES),
    }
    servers = {
        "chain": ("chain", chain),
        "tree, 8 best": ("tree", replace(wide, leaders=LEADERS)),
        "tree": ("tree", wide),
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
        plain = [
            by_project(runner, Drafters(), prompt.ids, args.new)[0]
            for prompt in prompts
        ]
        decoded = {
            kind: [
                Decoded(
                    prompt.ids,
                    text,
                    *by_project(runner, by_tokens(mask, planner), prompt.ids, args.new),
                )
                for prompt, text in zip(prompts, plain)
            ]
            for kind, planner in planners.items()
        }
        for shape, (kind, server) in servers.items():
            row = compare(server, mask, decoded[kind], planners[kind].k, args.new)
            name = {"prompts": name_of(source), "drafts": shape}
            print(json.dumps(name | row), flush=True)


if __name__ == "__main__":
    main()
