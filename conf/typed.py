"""Settings that a program makes, not YAML: every value of its field's type, or refused by name. Pure."""

import math
from functools import cache
from numbers import Integral, Real
from operator import index
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

# Metadata of a field that names a file, a folder or a list of them (conf/paths.py). True may be the name of the
# property that lists them.
PATH = {"path": True}
# Those of a model directory, and of a folder with its tokenizer, which take a hub name as well (conf/hub.py).
MODEL = {**PATH, "hub": "model"}
TOKENIZER = {**PATH, "hub": "tokenizer"}
WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list of texts",
}


def take_types(config: Any, group: str) -> None:
    """Bring a dataclass's values to its fields' types: numbers of any library become Python's.

    Knows the types of WANTED, and None where a field may be that. Raises ValueError, naming `group.field`, for
    what is of another: true is no number, and a text is none either.
    """
    for name, kinds in _kinds(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        if value is None and type(None) in kinds:
            continue
        kind = next(kind for kind in kinds if kind in WANTED)
        if not _is_a(value, kind):
            raise ValueError(f"{group}.{name} must be {WANTED[kind]}, got {value!r:.60}")
        if kind is int:
            setattr(config, name, index(value))
        elif kind is float:
            setattr(config, name, _real(value))


@cache
def _kinds(schema: type) -> dict[str, tuple[type, ...]]:
    """Of a field, the types that its annotation names: list of list[str], int and None of int | None."""
    unions = {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for name, hint in get_type_hints(schema).items()
    }
    return {name: tuple(get_origin(hint) or hint for hint in hints) for name, hints in unions.items()}


def _is_a(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _real(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
