"""Texts side by side: plain decoding and the default decoder on batches of a set's prompts.

Every size decodes the same texts, in batches. One decoder runs right after the other, in an order that turns
from round to round. A rate is the tokens of all texts per second, behind the first step of each batch.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any

from infer.benchmarks.prompts import TokenPrompt
from infer.engine.reading import Request
from infer.loop import decode
from infer.measure.runs import clock, seed_of
from infer.speed.bench import Own
from infer.speed.statistics import Weighed, estimate

KEY = ("prompt_set", "dtype", "temperature", "batch")


def run_batches(
    own: Own, prompts: Sequence[TokenPrompt], size: int, *, texts: int, seed: int
) -> dict[str, Any]:
    """Decode `texts` prompts, a small set's more than once, `size` side by side; return the record of it."""
    chosen = list(islice(cycle(prompts), texts))
    runs = [_run(own, chosen[at : at + size], seed) for at in range(0, texts, size)]
    tokens, seconds = (sum(run[name] for run in runs) for name in ("tokens", "seconds"))
    return {"tokens": tokens, "seconds": seconds, "texts": [text for run in runs for text in run["texts"]]}


def _run(own: Own, prompts: Sequence[TokenPrompt], seed: int) -> dict[str, Any]:
    """One batch; what comes before the second step is not counted."""
    requests = [Request(prompt.ids, seed_of(prompt, seed)) for prompt in prompts]
    limits = own.limits.of(prompts[0].ends, prompts[0].max_new_tokens)  # those of the whole set
    texts, first, first_tokens = [list[int]() for _ in prompts], 0.0, 0
    for steps in decode(own.runner, requests, own.drafters, limits, own.sampling):
        for step in steps:
            texts[step.sequence] += step.tokens
        if not first:
            first, first_tokens = clock(), sum(map(len, texts))
    return {
        "tokens": sum(map(len, texts)) - first_tokens,
        "seconds": clock() - first,
        "texts": [hashlib.sha256(str(text).encode()).hexdigest()[:16] for text in texts],
    }


def batch_rows(units: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each set, dtype and batch, of all rounds."""
    pairs: dict[tuple[Any, ...], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for unit in units:
        for one in unit.get("batches", []):
            if one["plain"]["tokens"] and one["auto"]["tokens"]:
                pairs.setdefault(tuple(one[name] for name in KEY), []).append((one["plain"], one["auto"]))
    return [dict(zip(KEY, key)) | _row(rounds) for key, rounds in sorted(pairs.items())]


def _row(rounds: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    ratios = [Weighed(plain["seconds"], _rate(auto) / _rate(plain)) for plain, auto in rounds]
    speedup = estimate([ratios])
    assert speedup
    rate = median(_rate(plain) for plain, _ in rounds)
    pairs = [pair for plain, auto in rounds for pair in zip(plain["texts"], auto["texts"], strict=True)]
    return {
        "rounds": len(rounds),
        "plain_tokens_per_second": rate,
        "tokens_per_second": rate * speedup.value,
        "speedup": speedup.value,
        "speedup_interval": speedup.interval,
        "identical": sum(plain == auto for plain, auto in pairs),
        "compared": len(pairs),
    }


def _rate(run: Mapping[str, Any]) -> float:
    return run["tokens"] / run["seconds"]
