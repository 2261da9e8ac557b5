"""What a report comes to: the gain of all drafts over plain decoding, and differences of quality. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infer.report.rows import KEY, PLACE, Row, drafts, groups, label, place_of, span

HEADLINE = "auto"  # all sources of drafts, by measurement: what decoding does by default


def best_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return for each prompt set and temperature the row of the headline: this project's default where it was
    measured, chosen before anything was, and else the best decoder that drafts.

    Rows whose every text is plain decoding's come first. The best is the one that is surely so fast, by the
    lower end of its interval: of many noisy speedups the highest is not to be believed. The row is held
    against plain decoding in its own dtype and in its fastest, against the fastest peer, unless their intervals
    overlap, and against the best decoder that drafts, where that is surely faster.

    All of it by tokens per second as infer.speed tells them, which are made of speedups, and those of pairs.
    """
    found = []
    for every in groups(rows, "prompt_set", "temperature").values():
        mine = [row for row in every if row["tokens_per_second"] and row["speedup"]]
        paces = [(row["tokens_per_second"], row) for row in mine]
        candidates = [(pace, row) for pace, row in paces if drafts(row)]
        if not candidates:
            continue
        _, fastest_draft = _best(candidates)
        pace, best = _best([one for one in candidates if one[1]["decoder"] == HEADLINE] or candidates)
        fastest, plain = _first((pace, row) for pace, row in paces if row["decoder"] == "plain")
        peers = [(pace, row) for pace, row in paces if row["peer"]]
        over, peer = _first(peers) if peers else (None, None)
        found.append(
            {
                **{name: best[name] for name in (*KEY, "tokens_per_second", "speedup", "speedup_interval")},
                "label": label(best),
                "exact": best["exact"],
                "faster": label(fastest_draft) if _is_faster(fastest_draft, best) else None,
                "over_faster": fastest_draft["tokens_per_second"] / pace,
                "over_fastest_plain": pace / fastest,
                "fastest_plain_dtype": plain["dtype"],
                "peer": label(peer) if peer else None,
                "over_peer": pace / over if peer and over and _apart(best, peer) else None,
            }
        )
    return found


def _best(candidates: Sequence[tuple[float, Row]]) -> tuple[float, Row]:
    """Return the exact row, where there is one, whose interval of tokens per second begins highest."""
    exact = [(pace, row) for pace, row in candidates if row["exact"]]
    return max(exact or candidates, key=lambda one: one[0] * sure(one[1]) / one[1]["speedup"])


def _is_faster(row: Row, other: Row) -> bool:
    return bool(row["tokens_per_second"] > other["tokens_per_second"] and _apart(row, other))


def _first(paces: Iterable[tuple[float, Row]]) -> tuple[float, Row]:
    return max(paces, key=lambda one: one[0])


def _apart(row: Row, other: Row) -> bool:
    """Whether the intervals of both, in tokens per second, are known and have nothing in common."""
    if not (row["speedup_interval"] and other["speedup_interval"]):
        return False
    (low, high), (least, most) = (
        [one["tokens_per_second"] / one["speedup"] * end for end in one["speedup_interval"]]
        for one in (row, other)
    )
    return bool(high < least or most < low)


def sure(row: Row) -> float:
    """The speedup that a decoder has by the lower end of its interval."""
    return row["speedup_interval"][0] if row["speedup_interval"] else row["speedup"]


def sentence(best: Row) -> str:
    """One of `best_rows`, told."""
    interval = best["speedup_interval"]
    told = f"{best['label']} in {best['dtype']} is {best['speedup']:.2f}x plain decoding"
    if interval:
        told += f" (95 %: {span(interval)}{', no clear difference' if _unclear(best) else ''})"
    if best["fastest_plain_dtype"] != best["dtype"]:
        told += f", {best['over_fastest_plain']:.2f}x plain decoding in {best['fastest_plain_dtype']}"
    if best["peer"]:
        over = best["over_peer"]
        told += f", {over:.2f}x the fastest peer" if over else ", no clear difference from the fastest peer"
        told += f" ({best['peer']}{', which drew other texts' * bool(best['temperature'])})"
    if best["faster"]:
        told += f"; {best['faster']} is {best['over_faster']:.2f}x as fast as that"
    return told + ("" if best["exact"] else "; not every text of it is plain decoding's, token for token")


def _unclear(row: Row) -> bool:
    """Whether the interval of a speedup holds 1."""
    interval = row["speedup_interval"]
    return bool(interval and interval[0] <= 1 <= interval[1])


def headline(best: Iterable[Row], scores: Iterable[Row]) -> str:
    """A report in one or two sentences."""
    told, coolest = [], list(best)
    if coolest:
        coolest = [row for row in coolest if row["temperature"] == min(one["temperature"] for one in coolest)]
        told.append(_speed_told(coolest))
    gaps = _first_scores(score for score in scores if score["difference"] is not None)
    if any(gap["model"] or gap["base"] for gap in gaps):
        told.append(_quality_told(gaps))
    return " ".join(told)


def _span(pattern: str, values: Sequence[float]) -> str:
    """Least and greatest as they are written, or the one that both are."""
    return " to ".join(dict.fromkeys(pattern.format(end) for end in (min(values), max(values))))


def _first_scores(scores: Iterable[Row]) -> list[Row]:
    """Of each benchmark and language the score of one answer, at the lowest temperature."""
    of_one = [score for score in scores if score["metric"] in ("pass@1", "exact match")]
    return [
        min(mine, key=lambda score: score["temperature"])
        for mine in groups(of_one, "benchmark", "language").values()
    ]


def _quality_told(gaps: list[Row]) -> str:
    between = _span("{:+.1f}", [100 * gap["difference"] for gap in gaps])
    count = len({gap["benchmark"] for gap in gaps})
    places = f"{count} benchmark{'s' * (count > 1)}"
    if count < len(gaps):
        places = f"{len(gaps)} languages of {places}"
    told = f"The quality is the base model's {between} points on {places}"
    if all(gap["interval"] for gap in gaps):
        clear = sum(not gap["interval"][0] <= 0 <= gap["interval"][1] for gap in gaps)
        told += f", {clear or 'none'} of them beyond the difference's 95 % interval"
    return f"{told}."


def _speed_told(best: list[Row]) -> str:
    names = list(dict.fromkeys(row["label"] for row in best))
    span_of = _span("{:.2f}", [row["speedup"] for row in best])
    places = best[0]["prompt_set"] if len(best) == 1 else f"{len(best)} prompt sets"
    exact = all(row["exact"] for row in best)
    told = (
        f"{' and '.join(names)} decode{'s' * (len(names) == 1)} {places} at {span_of} times the speed of plain "
    )
    told += "decoding, token for token the same" if exact else "decoding, but not token for token the same"
    unclear = sum(_unclear(row) for row in best)
    if unclear:
        told += f" ({'without' if len(best) == 1 else f'in {unclear} of them without'} a clear difference)"
    return f"{told}{_peers_told([row for row in best if row['peer']])}."


def _peers_told(best: list[Row]) -> str:
    """The same against the fastest peer, where there is one."""
    if not best:
        return ""
    clear = [row["over_peer"] for row in best if row["over_peer"]]
    sampled = ", which drew other texts" * bool(best[0]["temperature"])
    if not clear:
        return f", without a clear difference from the fastest peer{sampled}"
    ends = _span("{:.2f}", clear)
    places = f" in {len(clear)} of them, and without a clear difference in the others"
    return f", and at {ends} times that of the fastest peer{sampled}{places * (len(clear) < len(best))}"


def changes(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each benchmark, language, metric and temperature the scores of model and base, decoded plainly, and
    their difference with its 95 % interval; None for what is not there.
    """
    found = []
    gaps = {place_of(gap): gap for gap in part["differences"]}
    plain = [row for row in part["rows"] if row["decoder"] == "plain"]
    for place, mine in groups(plain, *PLACE).items():
        by_who = {row["who"]: row for row in mine}
        model, base, gap = by_who.get("model"), by_who.get("base"), gaps.get(place)
        difference = model["value"] - base["value"] if model and base else None
        found.append(
            {
                **dict(zip(PLACE, place)),
                "model": model and model["value"],
                "model_interval": model and model["interval"],
                "base": base and base["value"],
                "difference": gap["value"] if gap else difference,
                "interval": gap and gap["interval"],
                "problems": mine[0]["problems"],
            }
        )
    return found
