"""Where the time of a step goes, and what one text takes beside time: looked at once, outside of the timed
rounds, because a clock within the loop waits for the device.

    draft      the drafter's `propose`: where a model drafts, its commit, its levels and their graph
    forward    the model's forward, until the path is chosen
    rest       the cache's commit, and what the drafter learns

And the milliseconds of a step by the rows of its forward, L(q) of reports: of the forward, the picks that are
made with it, and the reading of the drafts, which takes longer of sampled text. Decoding itself measures none
of it beforehand (drafters/costs.py).
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.costs import ROWS, Costs, rising
from infer.engine.forward import agreed_value, context_length
from infer.engine.output import ForwardOutput, Request
from infer.engine.runner import FINE, Clock, Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafters, Limits, Step, Verified, decode
from infer.measure.runs import clock
from infer.trees.token_graph import Outcome
from infer.trees.tree import Tree

PROCESS = Path("/proc/self")
T = TypeVar("T")


class Spent(NamedTuple):
    """Milliseconds of one step."""

    draft: float
    forward: float
    rest: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Medians of the parts, over all steps but the first, which waits for the prompt's forward."""

    ms_draft: float | None = None  # None of a text of one step, as the next two
    ms_forward: float | None = None
    ms_rest: float | None = None
    peak_memory_bytes: int | None = None
    drafted_nodes: float | None = None  # mean of the draft model's graphs; None: no graph
    graph_success: float | None = None  # share of graphs whose accepted path goes on behind a merged node


def profile(
    runner: Runner,
    drafters: Drafters,
    request: Request,
    limits: Limits,
    sampling: Sampling = GREEDY,
    *,
    device: torch.device,
    outcomes: Sequence[Outcome] = (),
) -> Profile:
    """Decode a text once. `outcomes` is the list to which the drafters' watch adds a draft model's graphs."""
    before = len(outcomes)
    steps, peak = peak_memory(device, lambda: timed(runner, drafters, request, limits, sampling))
    behind, drafts = [spent for _, spent in steps[1:]], outcomes[before:]
    draft, forward, rest = map(median, zip(*behind)) if behind else (None, None, None)
    nodes = fmean(outcome.graph.drafted for outcome in drafts) if drafts else None
    success = fmean(outcome.succeeded for outcome in drafts) if drafts else None
    return Profile(draft, forward, rest, peak, nodes, success)


def timed(
    runner: Runner,
    drafters: Drafters,
    request: Request,
    limits: Limits,
    sampling: Sampling = GREEDY,
    *,
    clock: Clock = clock,
) -> list[tuple[Step, Spent]]:
    """Return the steps of a text; the first one's draft has the prompt's forward in it."""
    steps, clocked, began = list[tuple[Step, Spent]](), ClockedRunner(runner, clock), clock()
    for (step,) in decode(clocked, [request], drafters, limits, sampling):
        times = (began, clocked.asked, clocked.chosen, clock())
        steps.append((step, Spent(*(1e3 * (after - before) for before, after in zip(times, times[1:])))))
        began = clock()
    return steps


class ClockedRunner(Runner):
    """Another runner, which knows when its last forward began and when the paths through it were chosen."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        # One cache and one set of captured graphs: a second would take memory, and minutes.
        vars(self).update(vars(runner))
        self._clock, self.asked, self.chosen = clock, 0.0, 0.0

    def forward(self, *args: Any, **kwargs: Any) -> ForwardOutput:
        """See Runner. The draft is made."""
        self.asked = self._clock()
        return super().forward(*args, **kwargs)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """See Runner. The paths are chosen."""
        self.chosen = self._clock()
        super().commit(paths)


def peak_memory(device: torch.device, work: Callable[[], T]) -> tuple[T, int | None]:
    """Return the value of `work` and its peak memory in bytes: allocated on a GPU, of the process on a CPU.

    Weights and caches are counted. None where the system does not report it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return work(), torch.cuda.max_memory_allocated(device)
    try:
        (PROCESS / "clear_refs").write_text("5")  # forgets the peak so far (proc_pid_clear_refs(5))
    except OSError:
        return work(), None
    value = work()
    peak = re.search(r"VmHWM:\s*(\d+) kB", (PROCESS / "status").read_text())
    return value, 1024 * int(peak[1]) if peak else None


ENOUGH = 4.0  # times L(1): no number of accepted drafts pays for more rows than that
SECONDS = 3.0  # approximate time of a measurement
BURST = 4  # consecutive steps of the same rows
PROBES, WIDTH = 4, 4  # whose drafts are read, candidates of each
SLOW = 0.3  # seconds of a forward from which the wait is announced


def context_for(capacity: int, lm: PreTrainedModel) -> int:
    """Return the context to measure at for texts of up to `capacity` tokens: about half of it."""
    half = min(4096, max(512, 2 ** (capacity - 1).bit_length())) // 2
    return min(half, context_length(lm.config))


class StepTimer:
    """Steps of a decoding loop on a model, against the clock."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        batch: int,
        context: int,
        sampling: Sampling = GREEDY,
        static: bool | None = None,
    ) -> None:
        self._lm = lm
        self._runner = Runner(lm, capacity=context, max_rows=ROWS[-1], batch=batch, static=static)
        self._sampling = sampling
        # What it proposes is not fed: only the rows that are asked for are. But drawing it takes its time.
        self._drafter = AdaptiveDrafter([0], FixedPolicy(PROBES, nodes=PROBES, width=WIDTH))
        self._clock = self._runner.clock
        self._batch, self._token = batch, lm.config.vocab_size // 2
        self._requests = [Request([self._token])] * batch
        # All rows fit the same columns, so that fixed shapes of the cache are the same for one row and many;
        # theirs have as many drafts as the most rows, and probes beside these.
        self._runner.prefill([[self._token] * (context - ROWS[-1] - PROBES)] * batch)

    def burst(self, q: int) -> float:
        """Measure the seconds of a step among its like: after other rows the caches are in another state."""
        return median([self.step(q) for _ in range(BURST)][1:])

    def step(self, q: int) -> float:
        """Measure the seconds of a forward of q rows in each sequence, and of all that comes with it."""
        return agreed_value(self._lm, max(self._verification(q), FINE))  # by no clock is it free: costs divide

    def _verification(self, q: int) -> float:
        """Time the forward with its picks, the reading of drafts, and what a drafter makes of these; without
        picks that are made only when they are asked for: plain decoding pays for them too, by the token.
        """
        token, probes, began = self._token, min(q - 1, PROBES), self._clock()
        tree = Tree.chain(token, [token] * (q - 1 - probes), probes=[token] * probes)
        output = self._runner.forward([tree] * self._batch, self._requests, self._sampling)
        walks, walked = self._walks(tree, output)
        for b, (path, choice) in enumerate(walks if probes else ()):
            answers = output.drafts(b, tree.drafted, WIDTH)
            self._drafter.observe(Verified(tree, path, choice, answers, q, 0.0))
            self._drafter.propose([choice], left=ROWS[-1])
        took = self._clock() - began
        _, again = self._walks(tree, output)  # what was made with the forward is looked up
        return took - min(walked, again)

    def _walks(self, tree: Tree, output: ForwardOutput) -> tuple[list[tuple[list[int], int]], float]:
        began = self._clock()
        walks = [tree.walk(output.chooser(b, ())) for b in range(self._batch)]
        return walks, self._clock() - began


def measure_costs(
    lm: PreTrainedModel, *, batch: int, context: int, sampling: Sampling, static: bool | None = None
) -> Costs:
    """Measure the times of rows in turns, so that a change of the machine's speed affects all alike."""
    bench = StepTimer(lm, batch=batch, context=context, sampling=sampling, static=static)
    rows, first = list[int](), 0.0
    for q in ROWS:
        last = min(bench.step(q) for _ in range(3))  # the first warms up
        if not first and last > SLOW:
            print("measuring, once, what a forward of several rows costs here ...", file=sys.stderr)
        first = first or last
        rows.append(q)
        if last > ENOUGH * first and len(rows) > 2:
            break
    turns = max(3, min(15, int(SECONDS / (2 * BURST * first * len(rows)))))
    times = np.array([[bench.burst(q) for q in rows] for _ in range(turns)])
    # Shares of their turn first: a turn on a slow moment of the machine says as much as another.
    shares = np.median(times / times.sum(1, keepdims=True), axis=0)
    ms = 1e3 * np.median(times.sum(1)) * np.array(rising(shares, [1] * len(rows)))
    return Costs(tuple(rows), tuple(ms.tolist()))
