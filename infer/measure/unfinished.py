"""What a run in units has in its folder until it is finished: names, and how they are read.

Knows neither the work nor how it is divided.
"""

from pathlib import Path
from typing import Any

from conf.files import read_sealed

HEADER = "header.json"  # what all units share
UNITS = "units"  # the folder of their files


def read_unit(file: Path) -> dict[str, Any]:
    """Read a unit of a run. Raises UserError for a damaged one."""
    return read_sealed(file, "the run does it again when it is started again")


def read_units(folder: Path) -> dict[str, Any]:
    """Read all units of a run so far, by name."""
    return {file.stem: read_unit(file) for file in sorted(folder.glob("[!.]*.json"))}


def read_header(file: Path) -> dict[str, Any]:
    """Return the header that all units of a run share. Raises UserError for a damaged one."""
    return read_sealed(file, f"remove {file.parent} to begin anew")
