"""Where the time of a step goes (GSD §7.1, Table 3).

    draft          the drafter's `propose`: the draft model's commit and levels, the graph, its tree
    verification   from the model's forward until the path is chosen
    others         what is left of the step: the model's commit, and what the drafter learns

Medians over all steps but a text's first, which waits for the prompt's forward, and its last, whose draft is
not known; greedy, all settings in turns on every prompt.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from infer.benchmarks.prompts import TokenPrompt
from infer.drawn import Drawn
from infer.loop import Drafters, decode
from infer.measure import clock
from infer.reading import Reading, Request
from infer.runner import Runner
from infer.study.bench import Bench, Way

SETTINGS = (("ssd", 1), ("tsd", 2), ("gsd", 2), ("tsd", 4), ("gsd", 4))


class Spent(NamedTuple):
    """Milliseconds of one step."""

    draft: float
    verification: float
    others: float


class ClockedRunner(Runner):
    """Knows how long each verification took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began, self.verified_ms = 0.0, 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Reading:
        """See Runner."""
        self._began = clock()
        return super().forward(*args, **kwargs)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """See Runner. The paths are chosen now."""
        self.verified_ms = 1e3 * (clock() - self._began)
        super().commit(paths)


def measure_time(bench: Bench) -> list[dict[str, Any]]:
    """A row for each of Table 3's."""
    watched = {setting: list[Drawn]() for setting in SETTINGS}
    drafters = {
        (method, k): bench.drafters(Way(bench.decode(method, k=k)), watched[method, k].append)
        for method, k in SETTINGS
    }
    runner = bench.runner(ClockedRunner, drafters.values())
    found = {setting: list[Spent]() for setting in SETTINGS}
    for round_ in range(1 + bench.config.rounds):  # the first warms up
        for prompt in bench.all_prompts:
            for setting, one in drafters.items():
                spent = _decode(bench, runner, one, watched[setting], prompt)
                found[setting] += spent if round_ else []
    return [
        {"method": method, "k": k, "steps": len(rows), **_medians(rows)} for (method, k), rows in found.items()
    ]


def _decode(
    bench: Bench, runner: ClockedRunner, drafters: Drafters, watched: list[Drawn], prompt: TokenPrompt
) -> list[Spent]:
    found, began = list[Spent](), None
    for _ in decode(runner, [Request(prompt.ids)], drafters, bench.limits()):
        ended = clock()
        if began is not None and watched:
            draft, verification = watched[-1].ms, runner.verified_ms
            found.append(Spent(draft, verification, 1e3 * (ended - began) - draft - verification))
        watched.clear()
        began = clock()
    return found


def _medians(rows: Sequence[Spent]) -> dict[str, float | None]:
    return {
        name: median(row[part] for row in rows) if rows else None for part, name in enumerate(Spent._fields)
    }
