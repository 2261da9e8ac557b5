"""Group the rows of a report; compute 95 % intervals of scores over problems. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import binomtest

LEVEL = 0.95
Interval = tuple[float, float]
#: A report by its parts, as JSON, and a row of a part.
Report = Mapping[str, Any]
Row = Mapping[str, Any]


def grouped(
    rows: Sequence[Row], *names: str
) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Group rows by the values of these columns; return (values, rows) in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def share(passed: int, total: int) -> Interval | None:
    """Return Wilson's interval of passed / total; None if total is 0.

    Wilson's interval is also correct for shares of 0 and 1.
    """
    if not total:
        return None
    interval = binomtest(passed, total).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)
