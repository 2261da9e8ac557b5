"""What a report comes to: a headline, the rows and scores it rests on, and warnings. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from infer.report.rows import KEY, PLACE, Row, differs, drafts, groups, label, place_of, span, task

HEADLINE = "auto"  # all sources of drafts, by measurement: what decoding does by default
MANY = 100  # problems whose scores are worth a card even where no difference is shown


def summary(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the headline, the fastest row of each set and temperature, and scores beside the base's."""
    best = best_rows(parts["speed"]["rows"]) if "speed" in parts else []
    scores = changes(parts["quality"]) if "quality" in parts else []
    model = next((model_name(part["settings"]["model"]) for part in parts.values()), "")
    return {"model": model, "sentence": headline(model, best, scores), "best": best, "scores": scores}


def model_name(model: str) -> str:
    """Return the last two parts of a model's folder, which are those of a hub name too."""
    return "/".join(PurePath(model).parts[-2:])


def best_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return for each prompt set and temperature the row of the headline: this project's default where it was
    measured, chosen before anything was, and else the best decoder that drafts.

    Rows whose every text is plain decoding's come first. The best has the highest lower end of its interval: of
    many noisy speedups the highest is not to be believed. The row is compared with plain decoding in its own
    dtype and in its fastest, with the fastest peer, unless their intervals overlap, and with the best decoder
    that drafts, where that is surely faster.

    All of it by the tokens per second of infer.speed, which are made of speedups, and those of pairs.
    """
    best_of = []
    for every in groups(rows, "prompt_set", "temperature").values():
        mine = [row for row in every if row["tokens_per_second"] and row["speedup"]]
        candidates = [row for row in mine if drafts(row)]
        if not candidates:
            continue
        fastest = _best(candidates)
        best = _best([row for row in candidates if row["decoder"] == HEADLINE] or candidates)
        faster = _rate(fastest) > _rate(best) and _apart(fastest, best)
        plain = max((row for row in mine if row["decoder"] == "plain"), key=_rate)
        peer = max((row for row in mine if row["peer"]), key=_rate, default=None)
        best_of.append(
            {
                **{name: best[name] for name in (*KEY, "tokens_per_second", "speedup", "speedup_interval")},
                "label": label(best),
                "exact": best["exact"],
                "faster": label(fastest) if faster else None,
                "over_faster": _rate(fastest) / _rate(best),
                "over_fastest_plain": _rate(best) / _rate(plain),
                "fastest_plain_dtype": plain["dtype"],
                "peer": label(peer) if peer else None,
                "over_peer": _rate(best) / _rate(peer) if peer and _apart(best, peer) else None,
            }
        )
    return best_of


def _rate(row: Row) -> float:
    return row["tokens_per_second"]


def _best(rows: Sequence[Row]) -> Row:
    """Return the exact row, where there is one, whose interval of tokens per second begins highest."""
    exact = [row for row in rows if row["exact"]]
    return max(exact or rows, key=lambda row: _rate(row) * sure(row) / row["speedup"])


def _apart(row: Row, other: Row) -> bool:
    """Return whether the intervals of both, in tokens per second, are known and have nothing in common."""
    if not (row["speedup_interval"] and other["speedup_interval"]):
        return False
    (low, high), (least, most) = (
        [each["tokens_per_second"] / each["speedup"] * end for end in each["speedup_interval"]]
        for each in (row, other)
    )
    return bool(high < least or most < low)


def sure(row: Row) -> float:
    """Return the speedup that a decoder has by the lower end of its interval."""
    return row["speedup_interval"][0] if row["speedup_interval"] else row["speedup"]


def how(temperature: float) -> str:
    """Return how the texts were chosen."""
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"


def sentence(best: Row) -> str:
    """Return one of `best_rows` in words."""
    interval = best["speedup_interval"]
    text = f"{best['label']} in {best['dtype']} is {best['speedup']:.2f}x plain decoding"
    if interval:
        text += f" (95 %: {span(interval)}{', no clear difference' if _unclear(best) else ''})"
    if best["fastest_plain_dtype"] != best["dtype"]:
        text += f", {best['over_fastest_plain']:.2f}x plain decoding in {best['fastest_plain_dtype']}"
    if best["peer"]:
        over = best["over_peer"]
        text += f", {over:.2f}x the fastest peer" if over else ", no clear difference from the fastest peer"
        text += f" ({best['peer']}{', which sampled other texts' * bool(best['temperature'])})"
    if best["faster"]:
        text += f"; {best['faster']} is {best['over_faster']:.2f}x as fast as that"
    return text + ("" if best["exact"] else "; not every text is plain decoding's, token for token")


def _unclear(row: Row) -> bool:
    interval = row["speedup_interval"]
    return bool(interval and interval[0] <= 1 <= interval[1])


def headline(model: str, best: Sequence[Row], scores: Iterable[Row]) -> str:
    """Return a report in one to three sentences."""
    texts = []
    if best:
        texts.append(_speed_text(model, groups(best, "temperature")))
    # Of each benchmark and language the score of one answer, at the lowest temperature.
    known = [score for score in scores if score["difference"] is not None]
    of_one = [score for score in known if score["metric"] in ("pass@1", "exact match")]
    firsts = groups(sorted(of_one, key=lambda score: score["temperature"]), "benchmark", "language").values()
    gaps = [mine[0] for mine in firsts if tells(mine[0])]
    if gaps:
        texts.append(_quality_text(gaps))
    return " ".join(texts)


def _speed_text(model: str, by_temperature: Mapping[tuple[Any, ...], Sequence[Row]]) -> str:
    """Return the lowest temperature first, the next one beside it."""
    heats = sorted(by_temperature)[:2]
    figures = []
    for (heat,) in heats:
        rows = by_temperature[heat,]
        unclear = sum(map(_unclear, rows))
        places = f" in {unclear} of them" if unclear < len(rows) else ""
        doubt = f" (without a clear difference{places})" if unclear else ""
        figures.append(f"{how(heat)}, {_range('{:.2f}', [row['speedup'] for row in rows])} times{doubt}")
    coolest = by_temperature[heats[0]]
    names = " and ".join(dict.fromkeys(row["label"] for row in coolest))
    sets = [row["prompt_set"].replace("_", " ") for row in coolest]
    places = sets[0] if len(sets) == 1 else f"{len(sets)} prompt sets"
    same = all(row["exact"] for heat in heats for row in by_temperature[heat])
    texts = "The texts are the same" if same else "Not all texts are the same"
    beside = "".join(f"; {figure}" for figure in figures[1:])
    return (
        f"{model} with drafts ({names}) on {places}: {figures[0]} as fast as without{beside}. "
        f"{texts}, token for token.{_peers_text(coolest)}"
    )


def _peers_text(best: Sequence[Row]) -> str:
    """Return the same against the fastest peer, where there is one."""
    peers = [row for row in best if row["peer"]]
    if not peers:
        return ""
    clear = [row["over_peer"] for row in peers if row["over_peer"]]
    names = " and ".join(dict.fromkeys(row["peer"] for row in peers))
    if not clear:
        return f" The fastest of other libraries' decoders ({names}) is not clearly slower or faster."
    others = ", without a clear difference in the others" * (len(clear) < len(peers))
    chosen = how(best[0]["temperature"]).capitalize()
    return (
        f" {chosen}, it is {_range('{:.2f}', clear)} times as fast as the fastest of other libraries' decoders "
        f"({names}){others}."
    )


def _range(pattern: str, values: Sequence[float]) -> str:
    """Format least and greatest as they are written, or the one that both are."""
    return " to ".join(dict.fromkeys(pattern.format(end) for end in (min(values), max(values))))


def _quality_text(gaps: list[Row]) -> str:
    between = _range("{:+.1f}", [100 * gap["difference"] for gap in gaps])
    count = len({gap["benchmark"] for gap in gaps})
    places = f"{count} benchmark{'s' * (count > 1)}"
    if count < len(gaps):
        places = f"{len(gaps)} languages of {places}"
    text = f"Its score is the base model's {between} points on {places}"
    if all(gap["interval"] for gap in gaps):
        clear = sum(not gap["interval"][0] <= 0 <= gap["interval"][1] for gap in gaps)
        text += f", {clear or 'none'} of them beyond the difference's 95 % interval"
    return f"{text}."


def tells(score: Row) -> bool:
    """Return whether a score says anything of the model: it is not 0 and, beside a base model's, differs
    clearly or is of many problems.
    """
    if not score["model"] and not score["base"]:
        return False
    if score["base"] is None or score["interval"] is None:
        return score["model"] is not None
    low, high = score["interval"]
    return not low <= 0 <= high or score["problems"] >= MANY


def changes(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each benchmark, language, metric and temperature the scores of model and base, decoded
    plainly, and their difference with its 95 % interval; None for what is not there.
    """
    scores = []
    gaps = {place_of(gap): gap for gap in part["differences"]}
    plain = [row for row in part["rows"] if row["decoder"] == "plain"]
    for place, mine in groups(plain, *PLACE).items():
        by_who = {row["who"]: row for row in mine}
        model, base, gap = by_who.get("model"), by_who.get("base"), gaps.get(place)
        difference = model["value"] - base["value"] if model and base else None
        scores.append(
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
    return scores


def warnings(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what a reader must know before believing the figures; a sentence for each fact."""
    sentences = [
        f"{kind} is partial: {part['units']['done']} of {part['units']['all']} units are done"
        for kind, part in parts.items()
        if part["units"]["done"] < part["units"]["all"]
    ]
    if "speed" in parts:
        sentences += _speed_warnings(parts["speed"]["rows"])
    if "quality" in parts:
        sentences += _quality_warnings(parts["quality"])
    return sentences


def _speed_warnings(rows: list[Row]) -> list[str]:
    sentences = [] if rows else ["no decoder was measured"]
    wrong = [row for row in rows if differs(row)]
    ours, peers = ([row for row in wrong if bool(row["peer"]) == peer] for peer in (False, True))
    for exact, why in ((True, "in float32 they must be"), (False, "in low precision near-ties decide")):
        mine = [row for row in ours if (row["dtype"] == "float32") == exact]
        if mine:
            sentences.append(f"not token for token plain decoding's texts: {_named(mine)}; {why}")
    if peers:
        sentences.append(f"peers whose greedy texts are not plain decoding's: {_named(peers)}")
    for (name,), mine in groups(rows, "prompt_set").items():
        if mine[0]["rounds"] == 1:
            sentences.append(f"{name} was measured in one round: its spread is not known")
        if mine[0]["prompts"] == 1:
            sentences.append(f"{name} has a single prompt: its figures are that prompt's")
    return sentences


def _named(rows: list[Row]) -> str:
    names = []
    for (name,), mine in groups([{**row, "label": label(row)} for row in rows], "label").items():
        worst = min(mine, key=lambda row: row["identical"] / row["compared"])
        names.append(
            f"{name} (at worst {worst['identical']} of {worst['compared']} the same, {worst['prompt_set']}, "
            f"{how(worst['temperature'])})"
        )
    return ", ".join(names)


def _quality_warnings(part: Mapping[str, Any]) -> list[str]:
    plain = [row for row in part["rows"] if row["decoder"] == "plain"]
    sentences = [
        f"{task(entry)}: {entry['decoder']} and {entry['against']} "
        f"decoding agree in {entry['identical']} of {entry['compared']} answers, where all must"
        for entry in part["same"]
        if entry["identical"] < entry["compared"]
    ]
    if long := _counts([row for row in plain if row.get("too_long")], "too_long"):
        sentences.append(f"prompts that leave no room for an answer in the context count as failed: {long}")
    cut = [row for row in plain if row.get("cut") and not row["temperature"]]
    if cut:
        limit = part["settings"]["max_new_tokens"]
        sentences.append(f"max_new_tokens={limit} cut answers off: {_counts(cut, 'cut')}")
    sentences += part.get("contaminated", [])
    scores = changes(part)
    if scores and not any(map(tells, scores)):
        passed = any(row["value"] for row in part["rows"])
        why = "there are too few problems" if passed else "no answer passed"
        sentences.append(f"{why}: these scores cannot tell models apart")
    sandbox = part.get("sandbox")
    if sandbox and sandbox["level"] == "limits":
        sentences.append(f"generated programs ran unconfined: {sandbox['told']}")
    return sentences


def _counts(rows: Sequence[Row], name: str) -> str:
    """Name tasks and models with a count: HumanEval Python 3 of 5 (base), 1 of 5 (model)."""
    places = groups([{**row, "task": task(row)} for row in rows], "task")
    return "; ".join(
        f"{place} " + ", ".join(f"{row[name]} of {row['problems']} ({row['who']})" for row in mine)
        for (place,), mine in places.items()
    )
