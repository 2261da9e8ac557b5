"""Two reports held against each other: what differs in how they were made, and their figures row by row.

Pure: knows reports, not where they lie.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infer.report.rows import KEY, PLACE, Row, differs, dotted, label, task

SCHEMA = 1
COMPARED = (
    "tokens_per_second",
    "speedup",
    "speedup_interval",
    "acceptance_rate",
    "mean_acceptance_length",
    "tokens_per_forward",
    "sources",
)


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Differences of what made them, rows that both have, and rows that one has."""
    ours, theirs = (_by_key(_rows(one, "speed"), KEY) for one in (first, second))
    scores, others = (_by_key(one["summary"]["scores"], PLACE) for one in (first, second))
    names = _names(first["name"], second["name"])
    return {
        "schema": SCHEMA,
        "names": names,
        "warnings": [
            f"{name}: {told}" for name, one in zip(names, (first, second)) for told in one["warnings"]
        ],
        "differences": list(_differences(first, second)),
        "speed": [_pair(ours[key], theirs[key]) for key in ours if key in theirs],
        "quality": [_scores(scores[key], others[key]) for key in scores if key in others],
        "lone": [
            {"report": name, "row": _told(row)}
            for name, mine, other in (
                (names[0], {**ours, **scores}, {**theirs, **others}),
                (names[1], {**theirs, **others}, {**ours, **scores}),
            )
            for key, row in mine.items()
            if key not in other
        ],
    }


def _names(first: str, second: str) -> list[str]:
    """Two, also of folders that are called alike."""
    return [f"{first} (A)", f"{second} (B)"] if first == second else [first, second]


def _rows(report: Mapping[str, Any], kind: str) -> list[Row]:
    return report[kind]["rows"] if report[kind] else []


def _by_key(rows: Iterable[Row], fields: tuple[str, ...]) -> dict[tuple[Any, ...], Row]:
    return {tuple(row[name] for name in fields): row for row in rows}


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of hardware, versions, commit and settings, in which figures may have their cause."""
    for kind in ("speed", "quality"):
        if not (first[kind] and second[kind]):
            continue
        ours, theirs = (dict(dotted(_made(one[kind]))) for one in (first, second))
        for name in dict.fromkeys((*ours, *theirs)):
            if ours.get(name) != theirs.get(name):
                values = [str(one.get(name, "")) for one in (ours, theirs)]
                yield {"part": kind, "name": name, "values": values}


def _made(part: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("hardware", "versions", "commit", "model", "ranks", "settings")
    made = {name: part[name] for name in kept if name in part}
    return {**made, "settings": {key: one for key, one in part["settings"].items() if key != "out"}}


def _pair(ours: Row, theirs: Row) -> dict[str, Any]:
    """A decoder's row of both: figures, the ratio of rates, and whether the intervals of speedup overlap."""
    rates = [row["tokens_per_second"] for row in (ours, theirs)]
    intervals = [row["speedup_interval"] for row in (ours, theirs)]
    found: dict[str, Any] = {name: ours[name] for name in KEY}
    for name in COMPARED:
        found |= {f"first_{name}": ours[name], f"second_{name}": theirs[name]}
    return found | {
        "ratio": rates[1] / rates[0] if all(rates) else None,
        "overlap": _overlap(*intervals) if all(intervals) and ours["decoder"] != "plain" else None,
        "first_differs": differs(ours),
        "second_differs": differs(theirs),
    }


def _overlap(ours: tuple[float, float], theirs: tuple[float, float]) -> bool:
    return ours[0] <= theirs[1] and theirs[0] <= ours[1]


def _scores(ours: Row, theirs: Row) -> dict[str, Any]:
    models = [ours["model"], theirs["model"]]
    intervals = [ours["model_interval"], theirs["model_interval"]]
    return {
        **{name: ours[name] for name in PLACE},
        "first_score": models[0],
        "second_score": models[1],
        "change": None if None in models else models[1] - models[0],
        "overlap": _overlap(*intervals) if all(intervals) else None,
    }


def _told(row: Row) -> str:
    """A row by name."""
    if "decoder" in row:
        return f"{label(row)} on {row['prompt_set']}, {row['dtype']}, temperature {row['temperature']:g}"
    return f"{task(row)}, {row['metric']}, temperature {row['temperature']:g}"
