"""Two reports side by side: what differs in how they were made, and their figures row by row, as files, as a
page, and as tables on a terminal of 80 columns.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from conf import UserError
from conf.console import PlainConsole
from conf.files import write_bytes, write_json
from conf.stage import check_place
from infer.report.page import render
from infer.report.rows import (
    KEY,
    PLACE,
    SOURCES,
    Row,
    differs,
    dotted,
    groups,
    label,
    number,
    percent,
    points,
    span,
    task,
)
from infer.report.tables import Line, Table, table
from infer.report.terminal import print_table
from infer.report.write import build, sheet

SCHEMA = 1
COMPARED = (
    *("tokens_per_second", "speedup", "speedup_interval", "acceptance_rate", "mean_acceptance_length"),
    *("tokens_per_forward", "sources"),
)
SIDES = ("first", "second")
APART = "*"
LEGEND = f"{APART} the intervals do not overlap"


def write_comparison(out: Path, first: Path, second: Path) -> dict[str, Any]:
    """Write comparison.json, CSV and index.html into `out`; returns the comparison.

    Raises UserError where one of the two is no report, and where `out` is one.
    """
    check_place(out)
    if any((out / name).exists() for name in ("report.json", "speed", "quality", "manifest.json")):
        raise UserError(
            f"out={out} must be a folder for the comparison alone, got another result in it. Use another out="
        )
    reports = [build(folder, setting="compare") for folder in (first, second)]
    comparison = {**compare(*reports), "folders": [str(first), str(second)]}
    for kind in ("speed", "quality"):
        if comparison[kind]:
            write_bytes(out / f"{kind}.csv", sheet(comparison[kind]))
    title = " and ".join(comparison["names"])
    page = render("compare.html.j2", title, found=comparison, page_tables=_tables(comparison), apart=LEGEND)
    write_bytes(out / "index.html", page.encode("utf-8", "replace"))
    write_json(out / "comparison.json", comparison)
    return comparison


def print_comparison(comparison: Mapping[str, Any]) -> None:
    """Print what differs, then the tables."""
    console = PlainConsole()
    first, second = comparison["names"]
    console.print(f"A: {first} ({comparison['folders'][0]})\nB: {second} ({comparison['folders'][1]})\n")
    for entry in comparison["differences"]:
        console.print(f"{entry['part']} {entry['name']}: {entry['values'][0]} | {entry['values'][1]}")
    console.print("" if comparison["differences"] else "Both were made alike.\n")
    for entry in _tables(comparison):
        print_table(console, entry)
    console.print(LEGEND)
    for entry in comparison["lone"]:
        console.print(f"only in {entry['report']}: {entry['row']}")
    for warning in comparison["warnings"]:
        console.print(f"warning: {warning}")


def _tables(comparison: Mapping[str, Any]) -> list[Table]:
    """Return the tables of both reports, for terminal and page alike."""
    head = ["decoder", "tok/s\nA", "\nB", "\nB/A", "speedup\nA", "\nB", "acc.\nA", "\nB"]
    tables = list[Table]()
    for (name, dtype, heat), mine in groups(comparison["speed"], "prompt_set", "dtype", "temperature").items():
        title = f"{name}, {dtype}, temperature {heat:g}"
        tables.append(Table(title, head, [_speed_line(row) for row in mine]))
        if rows := [row for row in mine if any(row[f"{side}_sources"] for side in SIDES)]:
            heads = [
                "decoder",
                *(cell for name in SOURCES.values() for cell in (f"{name} A", "B")),
                "length A",
                "B",
            ]
            tables.append(table(f"{title}: accepted drafts by source", heads, map(_source_row, rows)))
    if comparison["quality"]:
        head = ["benchmark", "metric", "A", "B", "B - A", ""]
        tables.append(table("Quality, decoded plainly", head, map(_quality_row, comparison["quality"])))
    return tables


def _speed_line(row: Row) -> Line:
    cells = [
        number(row["first_tokens_per_second"], ".0f"),
        number(row["second_tokens_per_second"], ".0f"),
        number(row["ratio"]),
        _speedup(row, "first"),
        _speedup(row, "second") + _mark(row),
        percent(row["first_acceptance_rate"]),
        percent(row["second_acceptance_rate"]),
    ]
    return Line(label(row), cells, ["differs"] * (row["first_differs"] or row["second_differs"]))


def _source_row(row: Row) -> list[str]:
    shares = [
        percent((row[f"{side}_sources"] or {}).get(name, {}).get("share")) for name in SOURCES for side in SIDES
    ]
    return [label(row), *shares, *(number(row[f"{side}_mean_acceptance_length"]) for side in SIDES)]


def _speedup(row: Row, which: str) -> str:
    value, interval = row[f"{which}_speedup"], row[f"{which}_speedup_interval"]
    return number(value) + (f" {span(interval)}" if interval and row["decoder"] != "plain" else "")


def _quality_row(row: Row) -> list[str]:
    heat = f", temperature {row['temperature']:g}" if row["temperature"] else ""
    scores = (percent(row["first_score"], 1), percent(row["second_score"], 1))
    return [task(row) + heat, row["metric"], *scores, points(row["change"]), _mark(row)]


def _mark(row: Row) -> str:
    return APART if row["overlap"] is False else ""


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two reports: what made them, the rows that both have, and the rows that one has."""
    ours, theirs = (
        _by_key(report["speed"]["rows"] if report["speed"] else [], KEY) for report in (first, second)
    )
    scores, others = (_by_key(report["summary"]["scores"], PLACE) for report in (first, second))
    names = [first["name"], second["name"]]
    if names[0] == names[1]:  # folders that are called alike
        names = [f"{names[0]} (A)", f"{names[1]} (B)"]
    return {
        "schema": SCHEMA,
        "names": names,
        "warnings": [
            f"{name}: {warning}"
            for name, report in zip(names, (first, second))
            for warning in report["warnings"]
        ],
        "differences": list(_differences(first, second)),
        "speed": [_pair(ours[key], theirs[key]) for key in ours if key in theirs],
        "quality": [_scores(scores[key], others[key]) for key in scores if key in others],
        "lone": [
            {"report": name, "row": _described(row)}
            for name, mine, other in (
                (names[0], ours | scores, theirs | others),
                (names[1], theirs | others, ours | scores),
            )
            for key, row in mine.items()
            if key not in other
        ],
    }


def _by_key(rows: Iterable[Row], fields: tuple[str, ...]) -> dict[tuple[Any, ...], Row]:
    return {tuple(row[name] for name in fields): row for row in rows}


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in ("speed", "quality"):
        if not (first[kind] and second[kind]):
            continue
        ours, theirs = (dict(dotted(_made(part[kind]))) for part in (first, second))
        for name in dict.fromkeys((*ours, *theirs)):
            if ours.get(name) != theirs.get(name):
                values = [str(part.get(name, "")) for part in (ours, theirs)]
                yield {"part": kind, "name": name, "values": values}


def _made(part: Mapping[str, Any]) -> dict[str, Any]:
    names = ("hardware", "versions", "commit", "model", "ranks")
    facts = {name: part[name] for name in names if name in part}
    return {**facts, "settings": {key: value for key, value in part["settings"].items() if key != "out"}}


def _pair(ours: Row, theirs: Row) -> dict[str, Any]:
    """Return a decoder's row of both: figures, the ratio of rates, and whether speedups overlap."""
    rates = [row["tokens_per_second"] for row in (ours, theirs)]
    intervals = [row["speedup_interval"] for row in (ours, theirs)]
    row: dict[str, Any] = {name: ours[name] for name in KEY}
    for name in COMPARED:
        row |= {f"first_{name}": ours[name], f"second_{name}": theirs[name]}
    return row | {
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


def _described(row: Row) -> str:
    if "decoder" in row:
        return f"{label(row)} on {row['prompt_set']}, {row['dtype']}, temperature {row['temperature']:g}"
    return f"{task(row)}, {row['metric']}, temperature {row['temperature']:g}"
