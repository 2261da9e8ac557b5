"""Where the time of a step goes (GSD §7.1, Table 3).

    draft          the drafter's `propose`: the draft model's commit and levels, the graph, its tree
    verification   from the model's forward until the path is chosen
    others         what is left of the step: the model's commit, and what the drafter learns

Medians over all steps but a text's first, which waits for the prompt's forward, and its last, after which
nothing is learned; greedy, all settings in turns on every prompt.
"""

from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import Any

from infer.engine.reading import Request
from infer.speed.profile import Spent, timed
from infer.study.bench import Bench, Way

SETTINGS = (("ssd", 1), ("tsd", 2), ("gsd", 2), ("tsd", 4), ("gsd", 4))
PARTS = ("draft", "verification", "others")


def measure_time(bench: Bench) -> list[dict[str, Any]]:
    """A row for each of Table 3's."""
    drafters = {(method, k): bench.drafters(Way(bench.decode(method, k=k))) for method, k in SETTINGS}
    runner = bench.runner(drafters.values())
    share = bench.members.share(bench.all_prompts)
    spent_by = {setting: [list[Spent]() for _ in share] for setting in SETTINGS}
    for round_ in range(1 + bench.config.rounds):  # the first warms up
        for index, prompt in enumerate(share):
            for setting, one in drafters.items():
                steps = timed(runner, one, Request(prompt.ids), bench.limits())
                drafted = [spent for step, spent in steps[1:-1] if step.drafted]
                spent_by[setting][index] += drafted if round_ else []
    gathered = {setting: bench.members.gather(spent) for setting, spent in spent_by.items()}
    found = {setting: list(chain.from_iterable(spent)) for setting, spent in gathered.items()}
    return [
        {"method": method, "k": k, "steps": len(rows), **_medians(rows)} for (method, k), rows in found.items()
    ]


def _medians(rows: Sequence[Spent]) -> dict[str, float | None]:
    return dict(zip(PARTS, map(median, zip(*rows)))) if rows else dict.fromkeys(PARTS)
