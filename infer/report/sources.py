"""Tables of accepted drafts by source and by place. Pure."""

from collections.abc import Sequence
from typing import Any

from infer.report.rows import PLACES, SOURCES, Row, label, number, percent

COMPACT = (1, 2, 3, 4, 6, 8, 12, 16)  # places that a terminal has room for
CAPTION = "accepted drafts by source, and accepted at each place that was reached, in %"


def by_source(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose drafts have a source: those of n-grams and of adaptive tokens."""
    return [row for row in rows if row["sources"]]


def compact_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of shares in percent, without the paper's rows, whose drafts have one source."""
    head = ["", *SOURCES.values(), *map(str, COMPACT)]
    return head, [_compact(row) for row in by_source(rows) if row["decoder"] != "sdsat"]


def _compact(row: Row) -> list[str]:
    shares = [_percent(row["sources"].get(name, {}).get("share")) for name in SOURCES]
    reached = row["acceptance_where_reached"] or ()
    places = [_percent(reached[place - 1] if place <= len(reached) else None) for place in COMPACT]
    return [label(row), *shares, *places]


def _percent(share: float | None) -> str:
    return number(share and 100 * share, ".0f")


def page_table(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return head and rows for the page, each with its bar of shares; None without any source."""
    shown = by_source(rows)
    places = min(PLACES, max((len(row["acceptance_where_reached"] or ()) for row in shown), default=0))
    head = [*(f"{name}: accepted" for name in SOURCES.values()), *map(str, range(1, places + 1))]
    return {"head": head, "rows": [_page_row(row, places) for row in shown]} if shown else None


def _page_row(row: Row, places: int) -> dict[str, Any]:
    known = {name: row["sources"].get(name, {}) for name in SOURCES}
    parts = [
        {
            "kind": name,
            "share": f"{100 * one['share']:.2f}",
            "hover": f"{SOURCES[name]} {percent(one['share'])}",
        }
        for name, one in known.items()
        if one.get("share")
    ]
    reached = [*(row["acceptance_where_reached"] or ())[:places]]
    cells = [*(percent(one.get("acceptance")) for one in known.values()), *map(percent, reached)]
    return {
        "name": label(row),
        "parts": parts,
        "hover": ", ".join(part["hover"] for part in parts),
        "cells": [*cells, *[""] * (places - len(reached))],
    }


def compared_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of two reports' shares and mean acceptance lengths."""
    head = ["decoder", *(cell for name in SOURCES.values() for cell in (f"{name} A", "B")), "length A", "B"]
    sides = ("first", "second")
    shown = [row for row in rows if any(row[f"{side}_sources"] for side in sides)]
    return head, [
        [
            label(row),
            *(
                percent((row[f"{side}_sources"] or {}).get(name, {}).get("share"))
                for name in SOURCES
                for side in sides
            ),
            *(number(row[f"{side}_mean_acceptance_length"]) for side in sides),
        ]
        for row in shown
    ]
