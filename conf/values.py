"""Values that OmegaConf lets through and nothing can go on with. Pure."""

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

LARGEST = 2**63  # beyond it no array holds a whole number


def check_values(value: Any, kind: Any, name: str = "") -> None:
    """Raise ValueError, naming the setting, for a number that is none (NaN compares as no limit does, and JSON
    has none), for one of more than 63 bits, and for what a list of texts or numbers cannot hold.

    `value` is what a dataclass `kind` is made of, as plain values.
    """
    if isinstance(value, Mapping):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        inner = get_args(kind)[1] if get_origin(kind) is dict else Any
        for key, item in value.items():
            check_values(item, hints.get(key, inner), f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, list | Mapping) and Any not in _listed(kind):
                raise ValueError(f"{name} must be a list of single values, got {item} in it")
            check_values(item, Any, name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    elif isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise ValueError(f"{name} must be a number of up to 63 bits, got {value}")


def _listed(kind: Any) -> set[Any]:
    """Return what the elements of a list may be, where it is one."""
    kinds = [item for item in (kind, *get_args(kind)) if get_origin(item) is list]
    return {get_args(item)[0] for item in kinds} or {Any}
