"""The training log: one JSON object per step, in `log.jsonl`. Knows no metric."""

import json
from pathlib import Path
from typing import Any

from conf.files import write_bytes


class StepLog:
    """Appends to the log of a run that has `step` steps behind it; what is later than that is cut."""

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        if path.is_file():
            write_bytes(path, "".join(_lines(path, step)).encode())

    def append(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the metrics of a step; steps count from 1."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


def _lines(path: Path, step: int) -> list[str]:
    """The lines of the first steps, without what is none: the last of a run that was killed may be a part."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return kept
