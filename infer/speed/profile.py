"""Where the time of a step goes, and what one text takes beside time: looked at once, outside of the timed
rounds, because a clock within the loop waits for the device.

    draft      the drafter's `propose`: where a model drafts, its commit, its levels and their graph
    forward    the model's forward, until the path is chosen
    rest       the cache's commit, and what the drafter learns
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import torch

from infer.engine.reading import Reading, Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafters, Limits, Step, decode
from infer.measure.runs import Clock, clock
from infer.trees.token_graph import Outcome

PROCESS = Path("/proc/self")
T = TypeVar("T")


class Spent(NamedTuple):
    """Milliseconds of one step."""

    draft: float
    forward: float
    rest: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Medians of the parts, over all steps but the first, which waits for the prompt's forward; None of a text
    of one step. `drafted_nodes` is the mean of the draft model's graphs, without their roots, and
    `graph_success` the share of them whose accepted path goes on behind a merged node; None where no graph
    was drawn.
    """

    ms_draft: float | None = None
    ms_forward: float | None = None
    ms_rest: float | None = None
    peak_memory_bytes: int | None = None
    drafted_nodes: float | None = None
    graph_success: float | None = None


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
    """Decode a text once. `outcomes` is the list to which the drafters' watch adds graphs: a draft
    model's only, since adaptive tokens draw their graph for the watch alone, and would be slower for it.
    """
    before = len(outcomes)
    steps, peak = peak_memory(device, lambda: timed(runner, drafters, request, limits, sampling))
    behind, drafts = [spent for _, spent in steps[1:]], outcomes[before:]
    draft, forward, rest = map(median, zip(*behind)) if behind else (None, None, None)
    return Profile(
        ms_draft=draft,
        ms_forward=forward,
        ms_rest=rest,
        peak_memory_bytes=peak,
        drafted_nodes=fmean(len(outcome.graph.tokens) - 1 for outcome in drafts) if drafts else None,
        graph_success=fmean(outcome.succeeded for outcome in drafts) if drafts else None,
    )


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

    def forward(self, *args: Any, **kwargs: Any) -> Reading:
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
