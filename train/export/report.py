"""What infer.speed and infer.quality measured of a model directory, read from their report's folder.

Knows the files of a report; imports nothing of what wrote them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf import UserError
from conf.files import read_result
from conf.fingerprint import fingerprint
from conf.stage import read_manifest

SCHEMA = 2
KEY = ("prompt_set", "dtype", "temperature", "decoder", "k")  # of a row of speed


def read_report(folder: str | Path, model: Path) -> dict[str, Any]:
    """The report in `folder`, finished, of the finished model directory `model` and no other.

    Raises UserError.
    """
    path = Path(folder) / "report.json"
    if not path.is_file():
        raise UserError(f"report={folder}: wanted a folder that infer.report wrote, found no {path.name} in it")
    report = read_result(path)
    schema = report.get("schema")
    if schema != SCHEMA:
        raise UserError(f"{path}: wanted a report of schema {SCHEMA}, found schema {schema}")
    for kind in ("speed", "quality"):
        if report[kind]:
            made = read_manifest(Path(folder) / kind, kind, "report")
            if made["inputs"].get("model") != fingerprint(model):
                raise UserError(f"report={folder}: wanted what was measured of {model}, found another model's")
    return report


def speed_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The best decoder of each prompt set and temperature; `plain` is plain decoding's rate in its dtype."""
    rows = {tuple(row[name] for name in KEY): row for row in report["speed"]["rows"]}
    found = []
    for best in report["summary"]["best"]:
        place = tuple(best[name] for name in KEY)
        found.append({**rows[place], **best, "plain": rows[*place[:3], "plain", 0]["tokens_per_second"]})
    return found


def measured_on(part: Mapping[str, Any]) -> str:
    """Machine, versions and day of a part of a report, in one line."""
    machine, versions = part["hardware"], part["versions"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread(s)"
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    return f"{device}; {libraries}; {part['date'][:10]}"
