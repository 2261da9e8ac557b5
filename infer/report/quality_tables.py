"""Tables of quality in the shape of the paper's: 1, 2 and 3 of one kind of adaptive tokens, 5, 6 and 7 of
several kinds.

    Model                      HumanEval   MBPP        Table 1: benchmarks of one language beside each other
    Model                      C++  Java  ... Average  Table 2: a benchmark of several languages
    Model                      Python  Java  JS        Table 3: the same, of exact matches
"""

from collections.abc import Mapping, Sequence
from typing import Any

from infer.report.rows import PLACE, Row, benchmark, groups, language, percent, place_of, points, span
from infer.report.summary import changes

TITLES = {"pass@1": "Pass@1", "exact match": "Exact match"}


def quality_tables(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tables as title, head, and rows of texts: the base model, the fine-tuned one, each by each decoder, and
    the difference of both where they are decoded plainly.
    """
    gaps = {place_of(gap): gap for gap in changes(part)}
    return [
        _table(mine, gaps)
        for of_metric in groups(part["rows"], "metric", "temperature").values()
        for mine in _apart(of_metric)
    ]


def _apart(rows: Sequence[Row]) -> list[list[Row]]:
    """Benchmarks of one language together, each other one by itself."""
    by_name = {key[0]: mine for key, mine in groups(rows, "benchmark").items()}
    several = {name for name, mine in by_name.items() if len({row["language"] for row in mine}) > 1}
    single = [row for row in rows if row["benchmark"] not in several]
    return [*([single] if single else []), *(by_name[name] for name in by_name if name in several)]


def _table(rows: Sequence[Row], gaps: Mapping[tuple[Any, ...], Row]) -> dict[str, Any]:
    metric, temperature = rows[0]["metric"], rows[0]["temperature"]
    places = list(groups(rows, *PLACE))
    by_language = len(places) > 1 and len({row["benchmark"] for row in rows}) == 1
    lines = sorted(
        groups(rows, "who", "name", "decoder").items(),
        key=lambda item: (item[0][0] != "base", item[0][2] != "plain"),
    )
    body = [_line(f"{who} ({name}), {decoder}", mine, places) for (who, name, decoder), mine in lines]
    if any(gaps[place]["difference"] is not None for place in places if place in gaps):
        body.append(["difference", *_differences([gaps.get(place) for place in places])])
    title = TITLES.get(metric, str(metric)) + (f", {benchmark(rows[0]['benchmark'])}" if by_language else "")
    heads = [language(place[1]) if by_language else benchmark(place[0]) for place in places]
    return {
        "title": title + (f", temperature {temperature:g}" if temperature else ", greedy"),
        "head": ["model", *heads, *(["Average"] if by_language else [])],
        "rows": body if by_language else [line[:-1] for line in body],
    }


def _line(name: str, rows: Sequence[Row], places: Sequence[tuple[Any, ...]]) -> list[str]:
    """A model's scores, and their mean where all are there."""
    scores = {place_of(row): row for row in rows}
    found = [scores.get(place) for place in places]
    return [name, *map(_cell, found), percent(_mean([one["value"] if one else None for one in found]), 1)]


def _cell(score: Row | None) -> str:
    if score is None:
        return ""
    interval = score["interval"]
    ends = f" ({span([100 * end for end in interval], '.0f')})" if interval else ""
    return percent(score["value"], 1) + ends


def _differences(gaps: Sequence[Row | None]) -> list[str]:
    """In points, and their mean where all are there."""
    values = [gap["difference"] if gap else None for gap in gaps]
    intervals = [gap["interval"] if gap else None for gap in gaps]
    cells = [
        points(value) + (f" ({' to '.join(map(points, interval))})" if interval else "")
        for value, interval in zip(values, intervals)
    ]
    return [*cells, points(_mean(values))]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
