"""Scores on a terminal of 80 columns, in the shape of the paper's tables 1, 2 and 3: a line for each model, a
column for each benchmark, or for each language of one that has several.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from infer.report.rows import Row, groups

Column = tuple[str, str]  # benchmark and language
WIDEST = 7  # columns of figures in 80 characters


def print_scores(console: Console, quality: Mapping[str, Any]) -> None:
    """All scores: those of the base model, of the fine-tuned one, and their difference."""
    for (metric, temperature), rows in groups(quality["rows"], "metric", "temperature").items():
        gaps = [gap for gap in quality["differences"] if _kind(gap) == (metric, temperature)]
        same = [one for one in quality["same"] if one["temperature"] == temperature]
        for columns in _tables(rows):
            lines = _lines(columns, rows, gaps, same)
            for table in _cut(_heads(columns), lines):
                console.print(_title(columns, metric, temperature))
                console.print(table, "")


def _kind(row: Row) -> tuple[str, float]:
    return row["metric"], row["temperature"]


def _column(row: Row) -> Column:
    return row["benchmark"], row["language"]


def _model(row: Row) -> str:
    return row["who"] + (f", {row['decoder']}" if row["decoder"] != "plain" else "")


def _tables(rows: Sequence[Row]) -> list[list[Column]]:
    """The columns of each table: benchmarks of one language together, the languages of others apart."""
    found = [list(dict.fromkeys(map(_column, mine))) for mine in groups(rows, "benchmark").values()]
    single = [column for columns in found if len(columns) == 1 for column in columns]
    return [part for part in (single, *(columns for columns in found if len(columns) > 1)) if part]


def _by_language(columns: Sequence[Column]) -> bool:
    return len(columns) > 1 and len({benchmark for benchmark, _ in columns}) == 1


def _title(columns: Sequence[Column], metric: str, temperature: float) -> str:
    benchmark = f"{columns[0][0]}: " if _by_language(columns) else ""
    how = f"sampled at temperature {temperature:g}" if temperature else "greedy decoding"
    return f"{benchmark}{metric} in %, {how}"


def _heads(columns: Sequence[Column]) -> list[str]:
    if _by_language(columns):
        return [*(language for _, language in columns), "average"]
    return [name if language in ("", "python") else f"{name} {language}" for name, language in columns]


def _lines(
    columns: Sequence[Column], rows: Sequence[Row], gaps: Sequence[Row], same: Sequence[Row]
) -> dict[str, list[str]]:
    """The cells of every line by its label; the interval of a difference stands below it."""
    average = _by_language(columns)
    models = groups(sorted(rows, key=lambda row: row["who"]), "who", "decoder").values()
    picked = {_model(mine[0]): _pick(mine, columns) for mine in models}
    lines = {label: _cells(found, lambda row: row["value"], ".1f", average) for label, found in picked.items()}
    if any(found := _pick(gaps, columns)):
        lines["difference"] = _cells(found, lambda row: row["value"], "+.1f", average)
        lines["  95 %: from"] = _cells(found, lambda row: row["interval"][0], "+.1f")
        lines["  to"] = _cells(found, lambda row: row["interval"][1], "+.1f")
    first = next(iter(picked.values()))
    lines["problems"] = ["" if row is None else str(row["problems"]) for row in first]
    if any(found := _pick(same, columns)):
        lines["identical"] = _cells(found, lambda row: row["identical"] / row["compared"], ".1f")
    return lines


def _pick(rows: Iterable[Row], columns: Sequence[Column]) -> list[Row | None]:
    by_column = {_column(row): row for row in rows}
    return [by_column.get(column) for column in columns]


def _cells(
    rows: Sequence[Row | None], value: Callable[[Row], float], form: str, average: bool = False
) -> list[str]:
    """In percent, and their mean where all are there."""
    cells = ["" if row is None else format(100 * value(row), form) for row in rows]
    if average:
        values = [value(row) for row in rows if row is not None]
        cells.append(format(100 * mean(values), form) if len(values) == len(rows) else "")
    return cells


def _cut(heads: Sequence[str], lines: Mapping[str, list[str]]) -> list[Table]:
    """As many tables as it takes for each to fit a line."""
    return [
        _table(heads[at : at + WIDEST], {label: cells[at : at + WIDEST] for label, cells in lines.items()})
        for at in range(0, len(heads), WIDEST)
    ]


def _table(heads: Sequence[str], lines: Mapping[str, list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    for label, cells in lines.items():
        table.add_row(label, *cells)
    return table
