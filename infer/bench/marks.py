"""Marks of speeds that are not to be believed. Pure.

    machine busy   plain decoding beside itself did not have a speedup of 1, or a decoder of
                   the set has a speedup that is impossible: all speeds of the set
    impossible     more times as fast as plain decoding as it has tokens per forward

A forward of q rows never takes less time than one of a single row, so a speedup over plain
decoding with the same weights is at most the tokens per forward. Weights of another size move
this limit by the ratio of the sizes. Transformers' decoders have other attention and another
cache; their limit is wider.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from infer.bench.names import BASE, PEER, PLAIN, PLAIN_AGAIN
from infer.bench.statistics import grouped

BUSY = "machine busy"
IMPOSSIBLE = "impossible"
STEADY = (0.95, 1.05)  # of plain decoding beside plain decoding
MARGIN = 1.1  # over the tokens per forward
PEER_MARGIN = 1.5
Row = dict[str, Any]


def speedup_limit(row: Mapping[str, Any], *, base_scale: float = 1.0) -> float | None:
    """Return the largest speedup of a row that is possible; None if forwards are unknown.

    `base_scale` is the weights of the model over those of its base.
    """
    tokens = row["tokens_per_forward"]
    if tokens is None:
        return None
    if row["decoder"].startswith(PEER):
        return float(tokens * PEER_MARGIN)
    scale = max(1.0, base_scale) if row["decoder"] == BASE else 1.0
    return float(tokens * MARGIN * scale)


def mark_rows(rows: Sequence[Row], *, base_scale: float = 1.0) -> list[Row]:
    """Return the rows of a report with their `marks`, in the same order."""
    busy = {place for place, group in by_set(rows) if is_busy(group, base_scale)}
    marked = []
    for row in rows:
        marks = []
        if (row["prompt_set"], row["temperature"]) in busy:
            marks.append(BUSY)
        if exceeds_limit(row, base_scale):
            marks.append(IMPOSSIBLE)
        marked.append({**row, "marks": marks})
    return marked


def is_busy(rows: Sequence[Row], base_scale: float) -> bool:
    """Return True if the speeds of a set at one temperature contradict themselves."""
    return any(
        not is_steady(row)
        or (not row["decoder"].startswith(PEER) and exceeds_limit(row, base_scale))
        for row in rows
    )


def is_steady(row: Row) -> bool:
    """Return False for a second plain decoder that was faster or slower than the first."""
    if row["decoder"] != PLAIN_AGAIN:
        return True
    ends = row["speedup_interval"] or [row["speedup"]]
    return all(STEADY[0] <= end <= STEADY[1] for end in ends)


def exceeds_limit(row: Row, base_scale: float) -> bool:
    """Return True for an impossible speedup."""
    limit = speedup_limit(row, base_scale=base_scale)
    return row["decoder"] != PLAIN and limit is not None and row["speedup"] > limit


def busy_warnings(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each set whose rows are marked busy."""
    warnings = []
    for (prompt_set, temperature), group in by_set(rows):
        if not any(BUSY in row["marks"] for row in group):
            continue
        again = [row for row in group if row["decoder"] == PLAIN_AGAIN]
        reasons = [f"plain beside plain {spread(row)}" for row in again]
        reasons += [
            f"{row['decoder']} {row['speedup']:.2f} times as fast with "
            f"{row['tokens_per_forward']:.2f} tokens per forward"
            for row in group
            if IMPOSSIBLE in row["marks"] and row["decoder"] != PLAIN_AGAIN
        ]
        place = f"{prompt_set}, T={temperature:g}"
        warnings.append(
            f"{BUSY}: do not use the speeds of {place}: {'; '.join(reasons)}. "
            "Measure again into another out on a quiet machine, or with more rounds."
        )
    return warnings


def spread(row: Row) -> str:
    """Format a speedup and its interval."""
    ends = row["speedup_interval"]
    interval = f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""
    return f"{row['speedup']:.2f}{interval}, must be {STEADY[0]} to {STEADY[1]}"


def by_set(rows: Sequence[Row]) -> list[tuple[tuple[Any, ...], list[Any]]]:
    """Return the rows of each prompt set and temperature."""
    return grouped(rows, "prompt_set", "temperature")
