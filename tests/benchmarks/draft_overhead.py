"""The share of a draft step that is not the draft model's forward, by size and dtype.

    python -m tests.benchmarks.draft_overhead [--steps 20] [SIZE ...]      0.4M 15M 110M

A step is `propose` and `observe` of GSD's drafters in the decoding loop, k = 4, depth 10. Both models have
random weights, so that hardly a draft is accepted and every step draws all its levels. Thresholds would let
random graphs die or explode: none is set, and of each level the likeliest eight nodes get children (beside 1
and 4 at the top), somewhat more work for the graph than thresholds leave. One thread. Two figures:

    model     the decoder and the head (issue 6: what is outside them at most 15 %)
    forward   Runner.forward and the reading of what may follow: layout, mask, leading tokens too

The last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import islice

import torch

from infer.drafters import draft_model
from infer.drafters.budget import FixedBudget
from infer.engine.reading import LazyReading, Request
from infer.engine.runner import Runner
from infer.loop import Limits, decode
from infer.models.draft import Draft
from infer.trees.growth import Growth, Rules
from tests.benchmarks.loop_overhead import Clock
from tests.benchmarks.shapes import SIZES, random_llama

PROMPT, WIDTH, WARM, MOST = 64, 8, 3, 1024


class SteadyGrowth(Growth):
    """No level is wider than WIDTH."""

    def grow(self, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]) -> None:
        super().grow(ids, chances)
        likeliest = sorted(self.frontier, key=self._joint.__getitem__, reverse=True)
        self.frontier = sorted(likeliest[:WIDTH])


def measure(size: str, dtype: torch.dtype, *, steps: int) -> dict[str, float]:
    """Milliseconds and forwards of a step, and the shares outside; of bigger models a 15M is the target."""
    vocab = SIZES[size][-1]
    capacity = PROMPT + 11 * (steps + WARM)
    target = Runner(random_llama("15M" if vocab == 32000 else size, dtype), capacity=capacity, max_rows=101)
    lm = random_llama(size, dtype)
    runner = Runner(lm, capacity=capacity, max_rows=MOST)
    drafters = draft_model.LevelDrafters(
        Draft(lm, vocab, MOST),
        Rules(theta_prob=0.0, theta_sib=0.0),
        FixedBudget(100),
        most=MOST,
        take=lambda batch: runner,
        give=lambda runner: None,
    )
    inside = runner._target
    inside.decoder, inside.head = decoder, head = Clock(inside.decoder), Clock(inside.head)
    runner.forward = forward = Clock(runner.forward)  # type: ignore[assignment]
    drafters.propose, drafters.observe = propose, observe = Clock(drafters.propose), Clock(drafters.observe)  # type: ignore[assignment]
    prompt = torch.randint(0, vocab, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    running = decode(target, [Request(prompt)], drafters, Limits(capacity))
    list(islice(running, WARM))
    clocks = (decoder, head, forward, FOLLOWING, propose, observe)
    for clock in clocks:
        clock.seconds, clock.calls = 0.0, 0
    list(islice(running, steps))
    whole = propose.seconds + observe.seconds
    return {
        "ms": 1e3 * whole / steps,
        "forwards": forward.calls / steps,
        "outside_model": 1 - (decoder.seconds + head.seconds) / whole,
        "outside_forward": 1 - (forward.seconds + FOLLOWING.seconds) / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=["0.4M", "15M", "110M"])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    draft_model.Growth = SteadyGrowth  # type: ignore[misc]
    found = {}
    for size in args.sizes:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{size} {str(dtype).removeprefix('torch.')}"
            row = found[name] = measure(size, dtype, steps=args.steps)
            print(
                f"{name:14} {row['ms']:8.2f} ms a step of {row['forwards']:.0f} forwards; outside "
                f"model {row['outside_model']:6.1%}, outside forward {row['outside_forward']:6.1%}",
                flush=True,
            )
    print(json.dumps(found))


if __name__ == "__main__":
    FOLLOWING = Clock(LazyReading.following)
    LazyReading.following = lambda *args: FOLLOWING(*args)  # type: ignore[method-assign]
    main()
