"""Recorded drafts of a real pair of models, node for node against the paper word for word.

    python -m tests.drills.graphs MODEL_DIR DRAFT_DIR HELD_OUT.jsonl [--count 200]

GSD decodes held-out code in float64, by the paper's settings and by thresholds that make large graphs.
Every draft is drawn again by tests/infer/trees/literal.py, which asks the draft model with each path anew and
has no cache. The last line is JSON.
"""

import argparse
import json
import random
from pathlib import Path

import torch

from infer.drafters.budget import FixedBudget
from infer.drafters.draft_model import UNREAD, LevelDrafters
from infer.drafters.outcome import Outcome
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.loop import Limits, decode
from infer.models.checkpoint import eos_ids, load_model, load_text
from infer.models.draft import Draft
from infer.trees.growth import Rules
from tests.drills.lossless import prompts_of
from tests.infer.drafters.test_draft_model import model_behind
from tests.infer.trees import literal

SETTINGS = {"paper": Rules(), "wide": Rules(theta_prob=0.1, theta_sib=0.15, tau=1)}
NEW, ROWS = 40, 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lm, small = (load_model(folder, dtype="float64") for folder in (args.model, args.draft))
    draft = Draft(small, lm.config.vocab_size, small.config.max_position_embeddings)
    prompts = prompts_of(load_text(args.model), args.held_out, 3 * args.count, lm.config.vocab_size)
    random.Random(0).shuffle(prompts)
    target, found = Runner(lm, capacity=256, max_rows=64), {}
    for name, rules in SETTINGS.items():
        compared = equal = nodes = merged = 0
        for prompt in prompts:
            if compared == args.count:
                break
            seen: list[Outcome] = []
            drafters = LevelDrafters(
                draft,
                rules,
                FixedBudget(60),
                most=ROWS,
                take=lambda batch: Runner(small, capacity=256, max_rows=ROWS + UNREAD, batch=batch),
                give=lambda runner: None,
                watch=seen.append,
            )
            context = list(prompt)
            limits = Limits(NEW + rules.depth, eos_ids(lm))
            for (step,) in decode(target, [Request(prompt)], drafters, limits):
                if compared == args.count or not seen or len(context) >= len(prompt) + NEW:
                    break
                drawn = seen.pop()
                known = model_behind(small, context[:-1], rules.k)
                wanted = literal.draw(context[-1], known, **vars(rules))
                index = {node: n for n, node in enumerate(wanted)}
                same = drawn.graph.tokens == [node.token for node in wanted] and drawn.graph.merged == {
                    index[node]: index[node.into] for node in wanted if node.into
                }
                compared, equal = compared + 1, equal + same
                nodes, merged = nodes + len(wanted) - 1, merged + len(drawn.graph.merged)
                context += step.tokens
        found[name] = {"drafts": compared, "equal": equal, "nodes": nodes, "merged": merged}
        print(name, found[name], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
