"""A report's folder: JSON, tables, plots and page of what infer.speed and infer.quality left in it."""

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.files import write_bytes, write_json
from conf.sealed import sealed
from conf.stage import commit
from conf.tracker import TrackerConfig
from infer.report.page import report_page
from infer.report.parts import read_parts
from infer.report.plots import PLOTS, draw
from infer.report.rows import Row, flat
from infer.report.summary import best_rows, changes, headline
from infer.report.tracker import log
from infer.report.warnings import warnings

SCHEMA = 2


def write(folder: Path, tracker: TrackerConfig | None = None) -> dict[str, Any]:
    """Write report.json, index.html, CSV and PNG of what is there, log them where `tracker` says, and return
    the report.

    Raises UserError where nothing is there, or something else.
    """
    report = build(folder)
    images = draw(report)
    for name in PLOTS:
        path = folder / f"{name}.png"
        if name in images:
            write_bytes(path, images[name])
        else:
            path.unlink(missing_ok=True)
    for kind in ("speed", "quality"):
        if report[kind]:
            write_bytes(folder / f"{kind}.csv", sheet(report[kind]["rows"]))
    write_bytes(folder / "index.html", report_page(report, images).encode("utf-8", "replace"))
    write_json(folder / "report.json", sealed(report))
    if tracker:
        log(tracker, folder, report, sorted(images))
    return report


def build(folder: Path, *, setting: str = "out") -> dict[str, Any]:
    """The report, not written. Raises UserError as `read_parts` does."""
    parts = read_parts(folder, setting=setting)
    return {
        "schema": SCHEMA,
        "name": folder.resolve().name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "warnings": warnings(parts),
        "summary": summary(parts),
        "speed": parts.get("speed"),
        "quality": parts.get("quality"),
    }


def summary(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One sentence, the fastest rows by prompt set and temperature, and scores beside the base model's."""
    best = best_rows(parts["speed"]["rows"]) if "speed" in parts else []
    scores = changes(parts["quality"]) if "quality" in parts else []
    return {"sentence": headline(best, scores), "best": best, "scores": scores}


def sheet(rows: Sequence[Row]) -> bytes:
    """Rows as CSV, with every field that one of them has; halves of surrogate pairs as Python spells them."""
    plain = [flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in plain for name in row)))
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue().encode("utf-8", "backslashreplace")
