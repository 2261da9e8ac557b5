"""The rows of speed.json on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def show(report: Mapping[str, Any]) -> None:
    """A table for each set, type and temperature."""
    console = Console(highlight=False)
    groups = dict.fromkeys((row["prompt_set"], row["dtype"], row["temperature"]) for row in report["rows"])
    for name, dtype, temperature in groups:
        table = Table(
            title=f"{name}, {dtype}, temperature {temperature:g}", title_justify="left", box=box.SIMPLE_HEAD
        )
        for column in ("decoder", "tokens/s", "speedup", "95 %", "accepted", "tok/forward", "first ms", "same"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in report["rows"]:
            if (row["prompt_set"], row["dtype"], row["temperature"]) == (name, dtype, temperature):
                table.add_row(*_cells(row))
        console.print(table)


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["speedup_interval"] or (None, None)
    return [
        row["decoder"] + (f" {row['k']}" if row["k"] else ""),
        _number(row["tokens_per_second"], ".0f"),
        _number(row["speedup"], ".2f"),
        f"{_number(low, '.2f')}-{_number(high, '.2f')}",
        _number(row["acceptance_rate"], ".0%"),
        _number(row["tokens_per_forward"], ".2f"),
        _number(row["first_ms"], ".0f"),
        f"{row['identical']}/{row['compared']}",
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
