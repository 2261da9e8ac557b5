"""From units of work to quality.json: a pure function of a header and of what is done so far.

Who reports on an unfinished run calls it too: only answers that have been judged count.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from conf.sealed import read_result
from infer.measure.unfinished import HEADER, UNITS, read_header, read_units
from infer.quality.answers import Answer
from infer.quality.scores import bootstrap, difference, pass_at_k, wilson
from infer.quality.verdicts import TOO_LONG, key_of

RESULT = "quality.json"
UnitStore = Mapping[str, Mapping[str, Any]]


class ScoreKey(NamedTuple):
    """What the answers of a unit have in common."""

    benchmark: str
    language: str
    who: str
    decoder: str
    temperature: float


@dataclass(frozen=True, slots=True)
class Given:
    """An answer with its verdict."""

    answer: Answer
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Score:
    """A value for each problem."""

    way: ScoreKey
    metric: str
    values: dict[str, float]
    samples: int  # answers to each problem
    too_long: int  # problems whose prompt left no room for an answer
    cut: int  # answers that the limit of new tokens ended


def read(folder: Path) -> dict[str, Any]:
    """Return the result of a finished or unfinished folder. Raises UserError for none or a damaged file."""
    if (folder / RESULT).is_file():
        return read_result(folder / RESULT)
    return result(read_header(folder / HEADER), read_units(folder / UNITS))


def result(header: Mapping[str, Any], units: UnitStore) -> dict[str, Any]:
    """quality.json, of those units that are done."""
    answered = sorted((unit for unit in units.values() if "answers" in unit), key=lambda unit: unit["index"])
    verdicts = dict[str, Sequence[Any]]()
    for _, unit in sorted(units.items()):  # "verdicts-0000-again" behind "verdicts-0000"
        verdicts |= unit.get("verdicts", {})
    begun = bool(verdicts) or len(answered) == header["batches"]
    waiting = {way_of(unit) for unit in answered if not begun or not _all_judged(unit, verdicts)}
    given, done = dict[ScoreKey, list[Given]](), 0
    for unit in answered:
        judged = list(_judged(unit, verdicts, too_long=way_of(unit) not in waiting))
        given.setdefault(way_of(unit), []).extend(judged)
        done += len(judged) == len(unit["answers"])
    scores = [score for way, answers in given.items() for score in _scores(way, answers, header)]
    facts = {
        name: value for name, value in header.items() if name not in ("names", "exact", "batches", "shown")
    }
    return {
        **facts,
        "units": {"all": header["batches"], "done": done},
        "rows": [_row(score, header["names"]) for score in scores],
        "differences": list(_differences(scores)),
        "same": list(_same(given)),
        "samples": list(_samples(given, header["shown"])),
    }


def way_of(unit: Mapping[str, Any]) -> ScoreKey:
    """Of a unit of answers."""
    return ScoreKey(*(unit[name] for name in ScoreKey._fields))


def _all_judged(unit: Mapping[str, Any], verdicts: Mapping[str, Sequence[Any]]) -> bool:
    """Whether all have verdicts that need one."""
    where = unit["benchmark"], unit["language"]
    return all(answer["too_long"] or key_of(*where, answer) in verdicts for answer in unit["answers"])


def _judged(
    unit: Mapping[str, Any], verdicts: Mapping[str, Sequence[Any]], *, too_long: bool
) -> Iterator[Given]:
    """Those without room for an answer need no verdict, but count no earlier than the others of their way:
    alone they would be a score of 0.
    """
    for answer in unit["answers"]:
        if answer["too_long"]:
            if too_long:
                yield Given(answer, False, TOO_LONG)
        elif verdict := verdicts.get(key_of(unit["benchmark"], unit["language"], answer)):
            yield Given(answer, *verdict)


def _scores(way: ScoreKey, given: Sequence[Given], header: Mapping[str, Any]) -> Iterator[Score]:
    """One of the likeliest answers; of sampled ones pass@k for every k."""
    by_problem = dict[str, list[bool]]()
    for graded in given:
        by_problem.setdefault(graded.answer["id"], []).append(graded.passed)
    too_long = len({graded.answer["id"] for graded in given if graded.answer["too_long"]})
    limit = header["settings"]["max_new_tokens"]
    cut = sum(len(graded.answer["tokens"]) == limit for graded in given)
    for k in header["settings"]["k"] if way.temperature else (1,):
        enough = {id: passed for id, passed in by_problem.items() if len(passed) >= k}
        if enough:
            metric = "exact match" if way.benchmark in header["exact"] else f"pass@{k}"
            values = dict(zip(enough, pass_at_k(list(enough.values()), k), strict=True))
            yield Score(way, metric, values, max(map(len, enough.values())), too_long, cut)


def _row(score: Score, names: Mapping[str, str]) -> dict[str, Any]:
    values = list(score.values.values())
    interval = bootstrap(values) if score.way.temperature else wilson(round(sum(values)), len(values))
    return {
        **score.way._asdict(),
        "name": names[score.way.who],
        "metric": score.metric,
        "value": mean(values),
        "interval": interval,
        "problems": len(values),
        "samples": score.samples,
        "too_long": score.too_long,
        "cut": score.cut,
    }


def _differences(scores: Iterable[Score]) -> Iterator[dict[str, Any]]:
    """Return the model less the base, both decoded plainly, on the problems that both have answered."""
    by_way = {(score.way, score.metric): score for score in scores}
    for (way, metric), ours in by_way.items():
        theirs = by_way.get((way._replace(who="base"), metric))
        if way.who == "base" or way.decoder != "plain" or theirs is None:
            continue
        both = [id for id in ours.values if id in theirs.values]
        if both:
            gap, interval = difference([ours.values[id] for id in both], [theirs.values[id] for id in both])
            facts = {name: getattr(way, name) for name in ("benchmark", "language", "temperature")}
            yield {**facts, "metric": metric, "value": gap, "interval": interval, "problems": len(both)}


def _same(given: Mapping[ScoreKey, Sequence[Given]]) -> Iterator[dict[str, Any]]:
    """How many answers are those of plain decoding, token for token, where there was room for an answer."""
    for way, answers in given.items():
        plain = given.get(way._replace(decoder="plain"), ())
        tokens = {(graded.answer["id"], graded.answer["sample"]): graded.answer["tokens"] for graded in plain}
        pairs = [
            (graded.answer["tokens"], tokens[key])
            for graded in answers
            if not graded.answer["too_long"]
            and (key := (graded.answer["id"], graded.answer["sample"])) in tokens
        ]
        if way.decoder != "plain" and pairs:
            same = sum(ours == theirs for ours, theirs in pairs)
            yield {**way._asdict(), "against": "plain", "identical": same, "compared": len(pairs)}


def _samples(
    given: Mapping[ScoreKey, Sequence[Given]], prompts: Iterable[Mapping[str, str]]
) -> Iterator[dict[str, Any]]:
    """Return the likeliest answers to the problems that are to be shown, by every model and decoder."""
    for problem in prompts:
        for way, answers in given.items():
            if (way.benchmark, way.language) != (problem["benchmark"], problem["language"]) or way.temperature:
                continue
            facts = {**problem, "who": way.who, "decoder": way.decoder}
            for graded in answers:
                if graded.answer["id"] == problem["id"]:
                    yield {**facts, "pieces": graded.answer["pieces"], "verdict": graded.reason}
