"""A report's folder: JSON, tables, plots and page of what infer.speed and infer.quality left in it, finished or
what an interrupted run has kept so far; and the same to Weights & Biases, figures in the summary of the run.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import wandb

from conf import UserError
from conf.console import print_line
from conf.files import read_json, read_result, with_checksum, write_bytes, write_json
from conf.stage import MANIFEST, commit, partial_of, read_manifest
from conf.tracker import TrackerConfig, WandbRun, run_file
from infer.measure.distributed import HEADER
from infer.report.page import report_page
from infer.report.plots import PLOTS, draw
from infer.report.rows import KEY, QUALITY, SCORE_KEY, SPEED, Row, flat, label
from infer.report.summary import summary, warnings
from infer.report.training import FILE, kept_training, read_training

SCHEMAS = {"speed": 4, "quality": 1}  # as they are written
BEFORE_SOURCES = 3  # the last schema of speed in which `auto` drafted by adaptive tokens alone
FIELDS = {"speed": SPEED, "quality": QUALITY}
NEEDED = {"speed": KEY, "quality": (*SCORE_KEY, "value")}
LISTS = {
    "speed": ("limits", "costs", "batches", "samples", "skipped", "left_out"),
    "quality": ("differences", "same", "skipped", "samples"),
}
# Who makes a part of the units that are done. Asked for an unfinished run alone: they bring torch and more.
READERS = {"speed": "infer.speed.aggregate", "quality": "infer.quality.result"}


def read_parts(folder: Path, *, setting: str) -> dict[str, dict[str, Any]]:
    """Return the measured parts by name. Raises UserError for a folder without any, or a broken one."""
    if not folder.is_dir():
        raise UserError(f"{setting}={folder} must be a report's folder, got no such folder")
    parts = {kind: part for kind in SCHEMAS if (part := _read(folder, kind, setting)) is not None}
    if not parts:
        raise UserError(
            f"{setting}={folder} must be a report's folder, with what infer.speed or infer.quality left in it, "
            "got neither"
        )
    return parts


def _read(folder: Path, kind: str, setting: str) -> dict[str, Any] | None:
    place = folder / kind
    if (place / MANIFEST).is_file():
        read_manifest(place, kind, setting)
        path = place / f"{kind}.json"
        return checked(read_result(path), kind, path)
    partial = partial_of(place)
    if not (partial / HEADER).is_file():  # not begun, or nothing measured yet
        return None
    return checked(import_module(READERS[kind]).read(partial), kind, partial)


def checked(part: Any, kind: str, path: Path) -> dict[str, Any]:
    """Return a part with every field that its rows may have; what was not measured is None.

    Raises UserError for another schema, and for rows without what no table can do without.
    """
    schema = part.get("schema") if isinstance(part, Mapping) else None
    if kind == "speed" and schema == BEFORE_SOURCES:
        part = _renamed(part)
    elif schema != SCHEMAS[kind]:
        raise UserError(f"{path} must be a {kind} report of schema {SCHEMAS[kind]}, got schema {schema}")
    for row in part["rows"]:
        missing = [name for name in NEEDED[kind] if name not in row]
        if missing:
            raise UserError(f"{path} must have {missing[0]} in every row, got a row without it")
    empty: dict[str, Any] = {name: [] for name in LISTS[kind]}
    rows = [dict.fromkeys(FIELDS[kind]) | row for row in part["rows"]]
    return {**empty, **part, "rows": rows}


def _renamed(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a speed report from before there were sources of drafts, with today's name of its `auto`."""
    lists = {
        name: [row | {"decoder": "adaptive"} if row.get("decoder") == "auto" else row for row in part[name]]
        for name in ("rows", "samples")
        if name in part
    }
    return {**part, **lists, "schema": SCHEMAS["speed"]}


BEST = ("speedup", "speedup_interval", "tokens_per_second")
LOGGED = (*BEST, "acceptance_rate", "mean_acceptance_length", "tokens_per_forward")


def log(tracker: TrackerConfig, folder: Path, report: dict[str, Any], plots: Sequence[str]) -> None:
    """Log a report that lies in `folder`, with those plots of it, to the run that it has, or a new one."""
    if tracker.mode == "disabled":
        return
    parts = {kind: report[kind] for kind in ("speed", "quality") if report[kind]}
    models = [Path(part["settings"]["model"]) for part in parts.values() if part["settings"].get("model")]
    names = ("settings", "hardware", "versions", "commit")
    run = WandbRun(
        tracker,
        folder,
        file=run_file(folder),
        name=f"{report['name']}-report",
        job_type="report",
        settings={kind: {name: part.get(name) for name in names} for kind, part in parts.items()},
        tell=partial(print_line, error=True),
        linked=run_file(models[0].parent, models[0].name) if models else None,  # of the model's export
    )
    logged = {"sentence": report["summary"]["sentence"], "warnings": report["warnings"]}

    def send(run: Any) -> None:
        images = {name: wandb.Image(str(folder / f"{name}.png")) for name in plots}
        tables: dict[str, wandb.Table] = {}
        for kind, part in parts.items():
            columns, plain = _cells(part["rows"])
            tables[kind] = wandb.Table([*columns], [[row.get(name) for name in columns] for row in plain])
        run.log({**tables, **images})
        run.summary.update(logged | scalars(report))

    run.send(send)
    run.finish()


def scalars(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a report by names that W&B groups into sections.

    They are those of each decoder, of the best row of each prompt set as `best/`, and scores.
    """
    values = dict[str, Any]()
    for row in report["speed"]["rows"] if report["speed"] else ():
        name = label(row).replace(" ", "_")
        values |= _figures(f"speed/{_place(row)}/{name}", row, LOGGED)
    for best in report["summary"]["best"]:
        values |= _figures(f"best/{_place(best)}", best, BEST)
    for row in report["quality"]["rows"] if report["quality"] else ():
        place = "/".join(filter(None, (row["benchmark"], row["language"], _heat(row))))
        name = f"{row['metric'].replace(' ', '_')}/{row['who']}_{row['decoder']}"
        values[f"quality/{place}/{name}"] = row["value"]
    return values


def _figures(place: str, row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the figures of a row that were measured, an interval as its two ends."""
    cells = flat({name: row.get(name) for name in names})
    return {f"{place}/{name}": value for name, value in cells.items() if value is not None}


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['prompt_set']}/{row['dtype']}/{_heat(row)}"


def _heat(row: Mapping[str, Any]) -> str:
    """Return the temperature as part of a name: W&B takes a dot for a level."""
    return f"temperature_{row['temperature']:g}".replace(".", "_")


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return every field that one of the rows has, and the rows as plain cells."""
    plain = [flat(row) for row in rows]
    return list(dict.fromkeys(name for row in plain for name in row)), plain


SCHEMA = 2


def write(folder: Path, tracker: TrackerConfig | None = None, training: Path | None = None) -> dict[str, Any]:
    """Write report.json, index.html, CSV and PNG of what is there, log them where `tracker` says, and return
    the report; with a folder of `training` also training.json, which later reports find.

    Raises UserError where nothing is there, or something else.
    """
    if training:
        build(folder)  # refuses before anything is written
        write_json(folder / FILE, with_checksum(read_training(training)))  # where later reports find it
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
    write_json(folder / "report.json", with_checksum(report))
    if tracker:
        log(tracker, folder, report, sorted(drawings))
    return report


def build(folder: Path, *, setting: str = "out") -> dict[str, Any]:
    """Return the report, not written. Raises UserError as `read_parts` does."""
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
    """Return the seconds of the export and of each part of the report, where their manifests say so."""
    models = [Path(part["settings"]["model"]) for part in parts.values()]
    places = {"export": models[0], **{kind: folder / kind for kind in parts}}
    known = {name: place / MANIFEST for name, place in places.items() if (place / MANIFEST).is_file()}
    seconds = {name: read_json(path).get("seconds") for name, path in known.items()}
    return {name: value for name, value in seconds.items() if value}


def sheet(rows: Sequence[Row]) -> bytes:
    """Return rows as CSV; halves of surrogate pairs as Python spells them."""
    columns, plain = _cells(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue().encode("utf-8", "backslashreplace")
