"""The parts of a report on disk, speed and quality: finished, or what an interrupted run has kept so far."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from conf import UserError
from conf.sealed import read_result
from conf.stage import MANIFEST, partial_of, read_manifest
from infer.measure.unfinished import HEADER
from infer.report.rows import KEY, QUALITY, SCORE_KEY, SPEED

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
    """What is there of the two, by name. Raises UserError, naming the setting, where neither is, and for a
    part that cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{setting}={folder}: wanted a report's folder, found no such folder")
    found = {kind: part for kind in SCHEMAS if (part := _read(folder, kind, setting)) is not None}
    if not found:
        raise UserError(
            f"{setting}={folder}: wanted a report's folder, with what infer.speed or infer.quality left in it, "
            "found neither"
        )
    return found


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
    """A part with every field that its rows may have; what was not measured is None.

    Raises UserError for another schema, and for rows without what no table can do without.
    """
    schema = part.get("schema") if isinstance(part, Mapping) else None
    if kind == "speed" and schema == BEFORE_SOURCES:
        part = _renamed(part)
    elif schema != SCHEMAS[kind]:
        raise UserError(f"{path}: wanted a {kind} report of schema {SCHEMAS[kind]}, found schema {schema}")
    for row in part["rows"]:
        missing = [name for name in NEEDED[kind] if name not in row]
        if missing:
            raise UserError(f"{path}: wanted {missing[0]} in every row, found a row without it")
    empty: dict[str, Any] = {name: [] for name in LISTS[kind]}
    rows = [dict.fromkeys(FIELDS[kind]) | row for row in part["rows"]]
    return {**empty, **part, "rows": rows}


def _renamed(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a speed report from before there were sources of drafts, with today's name of its `auto`."""
    lists = {
        name: [one | {"decoder": "adaptive"} if one.get("decoder") == "auto" else one for one in part[name]]
        for name in ("rows", "samples")
        if name in part
    }
    return {**part, **lists, "schema": SCHEMAS["speed"]}
