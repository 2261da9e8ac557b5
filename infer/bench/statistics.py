"""Rows in groups; 95 % intervals of scores over a benchmark's problems. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import binomtest

LEVEL = 0.95
Interval = tuple[float, float]
Row = Mapping[str, Any]


def grouped(
    rows: Sequence[Row], *names: str
) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Return rows by the values of these columns, in their order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def share(passed: int, total: int) -> Interval | None:
    """Return Wilson's interval of a share, which is sound at 0 and 1 too; None of nothing."""
    if not total:
        return None
    interval = binomtest(passed, total).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)
