"""A turn: one prompt decoded once in every way, pair by pair; and how it is kept.

A record has the counts and times of a run, a fingerprint of its text, and by position how many drafts were
judged, how many of them stood behind accepted drafts alone, and how many were accepted. `token_ms` counts the
tokens by their milliseconds. Pure but for the decoders that it calls.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from infer.benchmarks.prompts import TokenPrompt
from infer.measure.runs import Decoder, Run
from infer.speed.pairs import blocks


class Group(NamedTuple):
    """Whose texts are the same, and whose plain decoding is the measure."""

    dtype: str
    temperature: float


class Way(NamedTuple):
    """A way to decode; k is 0 where it has none."""

    decoder: str
    k: int = 0


PLAIN = Way("plain")


def run_turn(
    decoders: Mapping[Group, Mapping[Way, Decoder]], prompt: TokenPrompt, turn: int
) -> list[dict[str, Any]]:
    """The records of a turn, a group each, in the order in which they ran."""
    return [
        {
            **group._asdict(),
            "blocks": [
                [{**way._asdict(), **record(ways[way](prompt))} for way in block]
                for block in blocks([way for way in ways if way != PLAIN], PLAIN, turn)
            ],
        }
        for group, ways in decoders.items()
    ]


def record(run: Run) -> dict[str, Any]:
    """A run in numbers."""
    return {
        "tokens": len(run.tokens),
        "seconds": run.seconds,
        "first_tokens": run.first_tokens,
        "first_seconds": run.first_seconds,
        "forwards": run.forwards,
        "rows": run.rows,
        "drafted": run.drafted,
        "accepted": run.accepted,
        "verifications": run.verifications,
        "levels": run.levels,
        "judged": by_position(run.depths),
        "right": by_position(run.accepts),
        "reached": by_position([min(deep, right + 1) for deep, right in zip(run.depths, run.accepts)]),
        "proposed": dict(run.proposed),
        "sources": dict(run.sources),
        "token_ms": token_milliseconds(run),
        "text": hashlib.sha256(str(list(run.tokens)).encode()).hexdigest()[:16],
    }


def token_milliseconds(run: Run) -> dict[str, int]:
    """Count the tokens by their milliseconds, to three digits: a step's time divided by its tokens.

    The first step's are not counted: its time is mostly the prompt's.
    """
    counts = Counter[str]()
    for (_, before), (tokens, after) in pairwise(run.arrivals):
        counts[f"{1e3 * (after - before) / tokens:.3g}"] += tokens
    return dict(counts)


def by_position(depths: Sequence[int]) -> list[int]:
    """How many of these depths reach position 1, 2, ... of a draft."""
    return [sum(depth >= position for depth in depths) for position in range(1, max(depths, default=0) + 1)]
