"""A report's folder: JSON, tables, plots and page of what infer.speed and infer.quality left in it."""

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.files import read_json, write_bytes, write_json
from conf.sealed import sealed
from conf.stage import MANIFEST, commit
from conf.tracker import TrackerConfig
from infer.report.page import report_page
from infer.report.parts import read_parts
from infer.report.plots import PLOTS, draw
from infer.report.rows import Row, flat
from infer.report.summary import summary, warnings
from infer.report.tracker import log
from infer.report.training import keep_training, kept_training

SCHEMA = 2


def write(folder: Path, tracker: TrackerConfig | None = None, training: Path | None = None) -> dict[str, Any]:
    """Write report.json, index.html, CSV and PNG of what is there, log them where `tracker` says, and return
    the report; with a folder of `training` also training.json, which later reports find.

    Raises UserError where nothing is there, or something else.
    """
    if training:
        build(folder)  # refuses before anything is written
        keep_training(folder, training)
    report = build(folder)
    drawings = draw(report)
    for name in PLOTS:
        path = folder / f"{name}.png"
        if name in drawings:
            write_bytes(path, drawings[name].png)
        else:
            path.unlink(missing_ok=True)
    for kind in ("speed", "quality"):
        if report[kind]:
            write_bytes(folder / f"{kind}.csv", sheet(report[kind]["rows"]))
    write_bytes(folder / "index.html", report_page(report, drawings).encode("utf-8", "replace"))
    write_json(folder / "report.json", sealed(report))
    if tracker:
        log(tracker, folder, report, sorted(drawings))
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
        "training": kept_training(folder),
        "seconds": stage_seconds(folder, parts),
    }


def stage_seconds(folder: Path, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How long the export of the model and each part of the report took, where their manifests say so."""
    models = [Path(part["settings"]["model"]) for part in parts.values()]
    places = {"export": models[0], **{kind: folder / kind for kind in parts}}
    known = {name: place / MANIFEST for name, place in places.items() if (place / MANIFEST).is_file()}
    seconds = {name: read_json(path).get("seconds") for name, path in known.items()}
    return {name: value for name, value in seconds.items() if value}


def sheet(rows: Sequence[Row]) -> bytes:
    """Rows as CSV, with every field that one of them has; halves of surrogate pairs as Python spells them."""
    plain = [flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in plain for name in row)))
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue().encode("utf-8", "backslashreplace")
