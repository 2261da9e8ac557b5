"""Values between solution and tests: plain data by value, all else by number. JSON, never code.

    JSON's own            None, bool, str, floats that are numbers, integers of up to 53 bits, lists
    {"tag": content}      what JSON has not; "object" is the number of something that stays where it is

A value of a type derived from a plain one (Counter, named tuple, IntEnum) is sent as the plain one: whatever
its methods would have said in a comparison, only the data goes over.
"""

import math
from collections.abc import Callable
from typing import Any, BinaryIO

_EXACT = 1 << 53
_GROUPS: tuple[Any, ...] = (tuple, set, frozenset)


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """What stands for `value` in JSON; `refer` gives the number of one that is no plain data, or raises."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -_EXACT < value < _EXACT else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, list):
        return [encode(item, refer) for item in list.__iter__(value)]
    if isinstance(value, dict):
        pairs = zip(dict.keys(value), dict.values(value), strict=True)
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in pairs]}
    for kind in _GROUPS:
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, refer) for item in kind.__iter__(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, range):
        return {"range": [hex(part) for part in (value.start, value.stop, value.step)]}
    if type(value).__module__ in ("decimal", "fractions") and type(value).__name__ in ("Decimal", "Fraction"):
        return {type(value).__name__: str(value)}
    return {"object": refer(value)}


def decode(found: Any, resolve: Callable[[int], Any]) -> Any:
    """The value again; `resolve` gives the object of a number. Raises ValueError or TypeError for what no
    value has.
    """
    if isinstance(found, list):
        return [decode(item, resolve) for item in found]
    if not isinstance(found, dict):
        return found
    ((tag, content),) = found.items()
    if tag == "object":
        return resolve(content)
    if tag == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in content}
    if tag in {kind.__name__ for kind in _GROUPS}:
        make = next(kind for kind in _GROUPS if kind.__name__ == tag)
        return make(decode(item, resolve) for item in content)
    return _scalar(tag, content)


def _scalar(tag: str, content: Any) -> Any:
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return float(content)
    if tag == "bytes":
        return bytes.fromhex(content)
    if tag == "bytearray":
        return bytearray.fromhex(content)
    if tag == "complex":
        return complex(*map(float, content))
    if tag == "range":
        return range(*(int(part, 16) for part in content))
    if tag == "Decimal":
        from decimal import Decimal  # rare, and slow to import

        return Decimal(content)
    if tag == "Fraction":
        from fractions import Fraction

        return Fraction(content)
    raise ValueError(f"wanted a value's tag, found {tag!r}")


def read_line(file: BinaryIO) -> bytes:
    """The next message. Raises EOFError where the other side has gone."""
    line = file.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line
