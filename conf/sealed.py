"""JSON files that say of themselves whether they are whole: what a run goes on from, and what it found.

    {"crc32": of all the rest, ...}

Knows nothing of what is in them.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.files import read_json

SUM = "crc32"


class Broken(Exception):
    """What is wrong with a file, as the end of a sentence."""


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is to be written, with its sum. Raises ValueError for what has one already."""
    if SUM in value:
        raise ValueError(f"{SUM} is the sum's own name")
    return {SUM: _sum(json.loads(json.dumps(value))), **value}


def unsealed(path: Path) -> dict[str, Any]:
    """Return what was written, without the sum. Raises Broken for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        intact = value.pop(SUM) == _sum(value)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Broken("cannot be read") from error
    if not intact:
        raise Broken("is not what was written")
    return value


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Return the same, for a user. Raises UserError, with what can be done."""
    try:
        return unsealed(path)
    except Broken as error:
        raise UserError(f"{path} must be whole, got a file that {error}: {remedy}") from error


def read_result(path: Path) -> dict[str, Any]:
    """Return what a stage has written; earlier versions did without a sum. Raises UserError for what is no JSON
    object, and for one that was changed since.
    """
    value = read_json(path)
    if SUM in value and value.pop(SUM) != _sum(value):
        raise UserError(f"{path} must be as it was written, got it changed since")
    return value


def _sum(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
