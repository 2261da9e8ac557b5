"""The report's plots as PNG, after the paper's Figures 3 and 4. Knows rows, not how they were measured."""

import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from infer.report.bars import scores, speedup_by_set
from infer.report.curves import acceptance_against_k, acceptance_by_position, rate_against_k, time_of_rows


class Plot(NamedTuple):
    """A figure of the report, and what is said below it; none is drawn for what was not measured."""

    part: str
    figure: Callable[[Mapping[str, Any]], Figure | None]
    caption: str


def draw(report: Mapping[str, Any]) -> dict[str, bytes]:
    """Those that there is something for, as PNG, by name."""
    found = {}
    for name, plot in PLOTS.items():
        figure = plot.figure(report[plot.part]) if report[plot.part] else None
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=150)
            found[name] = buffer.getvalue()
    return found


PLOTS = {
    "tokens_per_second": Plot(
        "speed",
        rate_against_k,
        "Tokens per second against k, as on the right of the paper's Figures 3 and 4. Paler lines are of "
        "higher temperatures.",
    ),
    "acceptance_rate": Plot(
        "speed",
        acceptance_against_k,
        "Accepted drafts over k against k, as on the left of the paper's Figures 3 and 4.",
    ),
    "speedup": Plot(
        "speed",
        speedup_by_set,
        "Speedup over plain decoding at the lowest temperature, with 95 % intervals; k=* is the fastest k of "
        "each prompt set, hatched bars are peers.",
    ),
    "acceptance_by_position": Plot(
        "speed",
        acceptance_by_position,
        "Share of the drafts accepted at each place, of the steps that drafted so deep, at the lowest "
        "temperature.",
    ),
    "time_of_rows": Plot(
        "speed",
        time_of_rows,
        "Time of a step by the rows of its forward: the flatter it is, the less a draft costs.",
    ),
    "scores": Plot(
        "quality", scores, "Scores of the base model and of the fine-tuned one, with 95 % intervals."
    ),
}
