"""Mark unreliable speeds in the rows of part=speed. Pure.

    machine busy   marks all rows of a prompt set at one temperature, if the second measurement
                   of plain decoding differs from the first, or a decoder has an impossible
                   speedup
    impossible     marks a row with a speedup above its number of tokens per forward

A forward of q rows never takes less time than a forward of one row. So with the same weights
a speedup over plain decoding is at most the number of tokens per forward. For weights of
another size the limit is multiplied by the ratio of the sizes. Transformers' decoders have
another attention and another cache, so their limit is wider.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from infer.bench.names import BASE, PEER, PLAIN, PLAIN_AGAIN
from infer.bench.statistics import Row, grouped

BUSY = "machine busy"
IMPOSSIBLE = "impossible"
# The meaning of the question mark of a marked row.
UNRELIABLE = "not reliable, as the machine was busy or the speedup is impossible"
STEADY = (0.95, 1.05)  # allowed speedups of plain decoding over plain decoding
MARGIN = 1.1  # a possible speedup is at most this times the tokens per forward
PEER_MARGIN = 1.5  # the same for Transformers' decoders
MarkedRow = dict[str, Any]


def speedup_limit(row: Mapping[str, Any], *, base_scale: float = 1.0) -> float | None:
    """Return the largest possible speedup of a row; None if its forwards are unknown.

    `base_scale` is the number of the model's weights over the number of its base's weights.
    """
    tokens = row["tokens_per_forward"]
    if tokens is None:
        return None
    if row["decoder"].startswith(PEER):
        return float(tokens * PEER_MARGIN)
    scale = max(1.0, base_scale) if row["decoder"] == BASE else 1.0
    return float(tokens * MARGIN * scale)


def mark_rows(rows: Sequence[Row], *, base_scale: float = 1.0) -> list[MarkedRow]:
    """Return the rows of a report with their `marks`, in the same order."""
    busy = {key for key, group in by_set(rows) if is_busy(group, base_scale)}
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
    """Return True if the speeds of a prompt set at one temperature are not consistent."""
    return any(
        not is_steady(row)
        or (not row["decoder"].startswith(PEER) and exceeds_limit(row, base_scale))
        for row in rows
    )


def is_steady(row: Row) -> bool:
    """Return False if a row is the second plain decoder and its speed differs from the first."""
    if row["decoder"] != PLAIN_AGAIN:
        return True
    ends = row["speedup_interval"] or [row["speedup"]]
    return all(STEADY[0] <= end <= STEADY[1] for end in ends)


def exceeds_limit(row: Row, base_scale: float) -> bool:
    """Return True if a speedup is impossible for the row's tokens per forward."""
    limit = speedup_limit(row, base_scale=base_scale)
    return row["decoder"] != PLAIN and limit is not None and row["speedup"] > limit


def busy_warnings(rows: Sequence[Row]) -> list[str]:
    """Return a warning for each prompt set and temperature with rows that are marked busy."""
    warnings = []
    for (prompt_set, temperature), group in by_set(rows):
        if not any(BUSY in row["marks"] for row in group):
            continue
        again = [row for row in group if row["decoder"] == PLAIN_AGAIN]
        reasons = [
            f"speedup of plain over plain {spread(row)}"
            for row in again
            if not is_steady(row)
        ]
        reasons += [
            f"{row['decoder']} {row['speedup']:.2f} times as fast with "
            f"{row['tokens_per_forward']:.2f} tokens per forward"
            for row in group
            if IMPOSSIBLE in row["marks"] and row["decoder"] != PLAIN_AGAIN
        ]
        group_name = f"{prompt_set}, T={temperature:g}"
        warnings.append(
            f"{BUSY}: do not use the speeds of {group_name}: {'; '.join(reasons)}. "
            "Measure again into another out on a quiet machine, or with more rounds."
        )
    return warnings


def spread(row: Row) -> str:
    """Format a speedup and its interval for a warning; three digits, as 0.948 is below 0.95."""
    ends = row["speedup_interval"]
    interval = f" ({ends[0]:.3f} to {ends[1]:.3f})" if ends else ""
    return f"{row['speedup']:.3f}{interval}, must be {STEADY[0]} to {STEADY[1]}"


def by_set(rows: Sequence[Row]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Group rows by prompt set and temperature."""
    return grouped(rows, "prompt_set", "temperature")
