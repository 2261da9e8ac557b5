"""The comparison of two reports: files and page in a folder, and tables on a terminal of 80 columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from conf import UserError
from conf.console import PlainConsole
from conf.files import write_bytes, write_json
from conf.stage import check_place
from infer.report.comparison import compare
from infer.report.page import render
from infer.report.rows import Row, groups, label, number, percent, points, span, task
from infer.report.sources import compared_table
from infer.report.terminal import OTHER, plain_table
from infer.report.write import build, sheet

APART = "*"
LEGEND = f"{APART} the intervals do not overlap"


def write_comparison(out: Path, first: Path, second: Path) -> dict[str, Any]:
    """Write comparison.json, CSV and index.html into `out`; returns the comparison.

    Raises UserError where one of the two is no report, and where `out` is one.
    """
    check_place(out)
    if any((out / name).exists() for name in ("report.json", "speed", "quality", "manifest.json")):
        raise UserError(f"out={out}: wanted a folder for the comparison alone, found another result in it")
    reports = [build(folder, setting="compare") for folder in (first, second)]
    found = {**compare(*reports), "folders": [str(first), str(second)]}
    for kind in ("speed", "quality"):
        if found[kind]:
            write_bytes(out / f"{kind}.csv", sheet(found[kind]))
    page = render("compare.html.j2", found=found, page_tables=_tables(found), apart=LEGEND)
    write_bytes(out / "index.html", page.encode("utf-8", "replace"))
    write_json(out / "comparison.json", found)
    return found


def print_comparison(found: Mapping[str, Any]) -> None:
    """What differs, then the tables."""
    console = PlainConsole()
    first, second = found["names"]
    console.print(f"A: {first} ({found['folders'][0]})\nB: {second} ({found['folders'][1]})\n")
    for one in found["differences"]:
        console.print(f"{one['part']} {one['name']}: {one['values'][0]} | {one['values'][1]}")
    console.print("" if found["differences"] else "Both were made alike.\n")
    for one in _tables(found):
        console.print(one["title"])
        console.print(_terminal_table(one["head"], one["rows"]))
        console.print()
    console.print(LEGEND)
    for one in found["lone"]:
        console.print(f"only in {one['report']}: {one['row']}")
    for warning in found["warnings"]:
        console.print(f"warning: {warning}")


def _terminal_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = plain_table(head)
    for row in rows:
        table.add_row(*row)
    return table


def _tables(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of title, head and rows of texts, for terminal and page alike."""
    head = ["decoder", "tok/s A", "B", "B/A", "speedup A", "B", "", "acc. A", "B"]
    tables = list[dict[str, Any]]()
    for (name, dtype, heat), mine in groups(found["speed"], "prompt_set", "dtype", "temperature").items():
        title = f"{name}, {dtype}, temperature {heat:g}"
        tables.append({"title": title, "head": head, "rows": [_speed_row(row) for row in mine]})
        sources, shares = compared_table(mine)
        if shares:
            tables.append({"title": f"{title}: accepted drafts by source", "head": sources, "rows": shares})
    rows = [_quality_row(row) for row in found["quality"]]
    quality = {"title": "Quality, decoded plainly", "head": ["benchmark", "metric", "A", "B", "B - A", ""]}
    return [*tables, *([{**quality, "rows": rows}] if rows else [])]


def _speed_row(row: Row) -> list[str]:
    return [
        label(row) + (f" {OTHER}" if row["first_differs"] or row["second_differs"] else ""),
        number(row["first_tokens_per_second"], ".0f"),
        number(row["second_tokens_per_second"], ".0f"),
        number(row["ratio"]),
        _speedup(row, "first"),
        _speedup(row, "second"),
        _mark(row),
        percent(row["first_acceptance_rate"]),
        percent(row["second_acceptance_rate"]),
    ]


def _speedup(row: Row, which: str) -> str:
    value, interval = row[f"{which}_speedup"], row[f"{which}_speedup_interval"]
    return number(value) + (f" {span(interval)}" if interval and row["decoder"] != "plain" else "")


def _quality_row(row: Row) -> list[str]:
    heat = f", temperature {row['temperature']:g}" if row["temperature"] else ""
    scores = (percent(row["first_score"], 1), percent(row["second_score"], 1))
    return [task(row) + heat, row["metric"], *scores, points(row["change"]), _mark(row)]


def _mark(row: Row) -> str:
    return APART if row["overlap"] is False else ""
