"""Units to the rows of speed.json. Pure, but for `read`.

A partial report is the same function of the units that there are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from infer.config import SOURCES
from infer.engine.runner import duration
from infer.measure.distributed import HEADER, UNITS, read_header, read_units
from infer.report.write import SCHEMAS
from infer.speed import PEERS
from infer.speed.statistics import Weighed, estimate, share_intervals, weighted_percentile
from infer.speed.work import batch_rows

PARTS = ("ms_draft", "ms_forward", "ms_rest", "peak_memory_bytes", "drafted_nodes", "graph_success")
ORDER = (
    "plain",
    *("sdsat", "adaptive", "auto", "ngrams", "prompt lookup"),
    *("ssd", "tsd", "gsd", "gsd probes", "base"),
    *PEERS.values(),
)

Record = Mapping[str, Any]  # of infer.speed.units


class Key(NamedTuple):
    """What a row is of."""

    prompt_set: str
    dtype: str
    temperature: float
    decoder: str
    k: int


class Pair(NamedTuple):
    """A run, the run of plain decoding beside it, whether both texts are the same, and the round."""

    run: Record
    plain: Record
    same: bool
    round: int


def read(folder: Path) -> dict[str, Any]:
    """Return the report of a folder, finished or not, with a header. Raises UserError for a damaged file."""
    return aggregate(read_units(folder / UNITS), read_header(folder / HEADER))


def aggregate(units: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """Return speed.json of the units that are done, in any order, and of the header that all of them share.

    A row's figures are of what came after a text's first step, but for those that say otherwise. Without pairs
    whose texts went on after it, a rate and its speedup are None. `tokens_per_second` is plain decoding's times
    the speedup, `tokens_per_second_measured` the row's own.
    """
    done = [units[name] for name in sorted(units)]
    pairs = _pairs([unit for unit in done if "groups" in unit])
    parts = {_key(part["prompt_set"], part, part): part for unit in done for part in unit.get("parts", [])}
    facts, settings = {name: value for name, value in header.items() if name != "all"}, header["settings"]
    orders = [*map(list, (settings["prompts"], settings["dtypes"], settings["temperatures"], ORDER))]
    rows, rate = list[dict[str, Any]](), None
    for key in sorted(pairs, key=lambda key: [*map(list.index, orders, key), key.k]):
        row = _row(key, pairs[key], parts.get(key), header)
        if key.decoder == "plain":  # the first of its group
            rate = row["tokens_per_second_measured"]
        # A decoder's own rate is of other moments than plain decoding's median, and may contradict its pairs.
        rows.append(row | {"tokens_per_second": row["speedup"] and rate and rate * row["speedup"]})
    return {
        "schema": SCHEMAS["speed"],
        **facts,
        "units": {"all": header["all"], "done": len(done)},
        "rows": rows,
        "batches": batch_rows(done),
        "samples": [sample for unit in done for sample in unit.get("samples", [])],
    }


def _key(prompt_set: str, group: Record, way: Record) -> Key:
    return Key(prompt_set, group["dtype"], group["temperature"], way["decoder"], way["k"])


def _pairs(turns: Sequence[Mapping[str, Any]]) -> dict[Key, dict[str, list[Pair]]]:
    """Group by row and prompt. Plain decoding is compared with its first run on that prompt."""
    pairs_by_key = dict[Key, dict[str, list[Pair]]]()
    texts = dict[tuple[Key, str], str]()
    for turn in turns:
        for group, block in [(each, block) for each in turn["groups"] for block in each["blocks"]]:
            plain = next(run for run in block if run["decoder"] == "plain")
            first = texts.setdefault((_key(turn["prompt_set"], group, plain), turn["prompt"]), plain["text"])
            for run in block:
                key = _key(turn["prompt_set"], group, run)
                same = run["text"] == (first if run is plain else plain["text"])
                pair = Pair(run, plain, same, turn["round"])
                pairs_by_key.setdefault(key, {}).setdefault(turn["prompt"], []).append(pair)
    return pairs_by_key


def _row(
    key: Key, by_prompt: Mapping[str, list[Pair]], part: Record | None, header: Mapping[str, Any]
) -> dict[str, Any]:
    pairs = [pair for rounds in by_prompt.values() for pair in rounds]
    runs = [pair.run for pair in pairs]
    compared = 0 if key.decoder == "base" else len(pairs)  # its texts are another model's
    identical = sum(pair.same for pair in pairs) if compared else 0
    token_ms = Counter[float]()
    for run in runs:
        token_ms.update({float(ms): tokens for ms, tokens in run.get("token_ms", {}).items()})
    row = {
        **key._asdict(),
        "peer": key.decoder in PEERS.values(),
        "prompts": len(by_prompt),
        "rounds": len({pair.round for pair in pairs}),
        **_speed(list(by_prompt.values())),
        **_counts(key, runs),
        **{f"token_ms_p{percent}": weighted_percentile(token_ms, percent) for percent in (50, 99)},
        **_where_reached([[pair.run for pair in rounds] for rounds in by_prompt.values()]),
        **{name: part[name] if part else None for name in PARTS},
        "identical": identical,
        "compared": compared,
        "exact": 0 < compared == identical,
    }
    return row | {"limit_share": _limit_share(row, header)}


def _speed(prompts: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    later = [[pair for pair in rounds if _later(pair.run) and _later(pair.plain)] for rounds in prompts]
    rate = estimate([[Weighed(_later(p.run), _rate(p.run)) for p in rounds] for rounds in later])
    speedup = estimate([[Weighed(_decoding(p.plain), _rate(p.run) / _rate(p.plain)) for p in r] for r in later])
    all_ = estimate(
        [[Weighed(p.plain["seconds"], _whole(p.run) / _whole(p.plain)) for p in r] for r in prompts]
    )
    assert all_
    firsts = [pair.run["first_seconds"] for rounds in prompts for pair in rounds if pair.run["first_seconds"]]
    return {
        "tokens_per_second_measured": rate and rate.value,
        "tokens_per_second_quartiles": rate and rate.quartiles,
        "speedup": speedup and speedup.value,
        "speedup_interval": speedup and speedup.interval,
        "speedup_quartiles": speedup and speedup.quartiles,
        "speedup_whole": all_.value,
        "speedup_whole_interval": all_.interval,
        "first_ms": 1e3 * median(firsts) if firsts else None,
    }


def _later(run: Record) -> int:
    """Return tokens behind the first step's; none are known to be where its time is not known, and is 0."""
    return run["tokens"] - run["first_tokens"] if run["first_seconds"] else 0


def _decoding(run: Record) -> float:
    return duration(run["first_seconds"], run["seconds"])


def _rate(run: Record) -> float:
    return _later(run) / _decoding(run)


def _whole(run: Record) -> float:
    return run["tokens"] / run["seconds"]


def _counts(key: Key, runs: Sequence[Record]) -> dict[str, Any]:
    """Return what the forwards came to. A decoder that does not count its forwards has 0 of them.

    The acceptance rate is both papers': accepted drafts over the places that were drafted for, which are k in
    every verification of SDSAT (its accept_rate), and else the levels of the tree. The mean acceptance length
    is that of vLLM and SGLang: tokens by verification. Node efficiency counts all nodes of the trees.
    `acceptance_by_position` is vLLM's per-position acceptance rate: of the drafts so deep those accepted to
    that place.
    """
    names = ("tokens", "forwards", "rows", "drafted", "accepted", "verifications", "levels")
    tokens, forwards, rows, drafted, accepted, verifications, levels = (
        sum(run[name] for run in runs) for name in names
    )
    places = key.k * verifications if key.decoder == "sdsat" else levels
    judged, right = (_summed([run[name] for run in runs]) for name in ("judged", "right"))
    timed = [run for run in runs if run["forwards"] > 1 and run["first_seconds"]]
    steps = [1e3 * _decoding(run) / (run["forwards"] - 1) for run in timed]
    return {
        "tokens": tokens,
        "forwards": forwards,
        "acceptance_rate": accepted / places if places else None,
        "mean_acceptance_length": 1 + accepted / verifications if verifications else None,
        "node_efficiency": accepted / drafted if drafted else None,
        "acceptance_by_position": [a / b for a, b in zip_longest(right, judged, fillvalue=0)],
        "sources": _sources(runs, judged),
        "tokens_per_forward": tokens / forwards if forwards else None,
        "rows_per_forward": rows / forwards if forwards and rows else None,
        "ms_per_forward": median(steps) if steps else None,
        "drafted": drafted,
    }


def _where_reached(prompts: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Return at each place, of the drafts whose earlier places were all accepted, their number, and the share
    of them that was accepted, with its 95 % interval.
    """
    places = max(len(run["reached"]) for runs in prompts for run in runs)
    right, reached = np.zeros((2, len(prompts), places), int)
    for index, runs in enumerate(prompts):
        for run in runs:
            right[index, : len(run["right"])] += np.array(run["right"], int)
            reached[index, : len(run["reached"])] += np.array(run["reached"], int)
    low, high = share_intervals(right, reached)
    return {
        "acceptance_where_reached": (right.sum(0) / reached.sum(0)).tolist(),
        "acceptance_where_reached_low": low,
        "acceptance_where_reached_high": high,
        "reached": reached.sum(0).tolist(),
    }


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(row) for row in zip_longest(*counts, fillvalue=0)]


def _sources(runs: Sequence[Record], judged: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return of each source its share of the accepted drafts, the share of its drafts that was accepted, and by
    place its part of `acceptance_by_position`; nothing where one model drafts.
    """
    names = SOURCES["sdsat"]
    proposed = {name: sum(run["proposed"].get(name, 0) for run in runs) for name in names}
    right = {name: _summed([run["sources"].get(name, ()) for run in runs]) for name in names}
    every = sum(map(sum, right.values()))
    return {
        name: {
            "accepted": sum(right[name]),
            "proposed": proposed[name],
            "share": sum(right[name]) / every if every else None,
            "acceptance": sum(right[name]) / proposed[name],
            "by_place": [a / b for a, b in zip(right[name], judged)],
        }
        for name in names
        if proposed[name]
    }


def _limit_share(row: Record, header: Mapping[str, Any]) -> float | None:
    """Return the least time that the row's mean forward could take on this machine, over what it took."""
    limit = next((limit for limit in header["limits"] if limit["dtype"] == row["dtype"]), None)
    if limit is None or row["ms_per_forward"] is None or row["rows_per_forward"] is None:
        return None
    rows, ms = zip(*limit["forward_ms_by_set"][row["prompt_set"]])
    return float(np.interp(row["rows_per_forward"], rows, ms)) / row["ms_per_forward"]
