"""Whether the folder of a run can be had, asked before any weight is read."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from conf import UserError
from conf.pages import ANOTHER
from conf.sealed import read_result
from conf.stage import BEGUN, begun, partial_of
from infer.measure.crew import told_by_its_rank


def check_place(out: Path, made: Mapping[str, Any]) -> None:
    """Raises LoneError where `crew.folder` would refuse. By the first rank alone; of what it has to make
    for that, nothing is left.
    """
    partial = partial_of(out)
    new = [folder for folder in (partial, *partial.parents) if not folder.exists()]
    record = partial / BEGUN
    with told_by_its_rank():
        if record.is_file():
            _check_threads(read_result(record), made, partial)
        with begun(out, made):
            if new and list(partial.iterdir()) == [record]:  # while no other run can begin there
                record.unlink()
                for folder in new:
                    with suppress(OSError):  # another run has begun beside it
                        folder.rmdir()


def _check_threads(found: Mapping[str, Any], made: Mapping[str, Any], partial: Path) -> None:
    """Of other threads, torchrun's one among them, it is told how to go on."""
    machine, now = found.get("hardware"), made["hardware"]["threads"]
    was = machine.get("threads") if isinstance(machine, Mapping) else None
    if was is not None and was != now:
        raise UserError(
            f"out={partial}: wanted to go on with the {was} thread(s) that it was begun with, found {now}: "
            f"give threads={was}, choose another out, or remove the folder",
            page=ANOTHER,
        )
