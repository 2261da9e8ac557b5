"""Damage to bytes, to texts and to JSON values. Every function draws from the generator that it is given."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "a\nb",
    "\r\n\t",
    "\ud800",  # a lone surrogate: no UTF-8
    "\udcff",  # what a file's name that is no UTF-8 is read as
    "\ufeff",
    "‮txet",  # right to left
    "e\u0301",
    "👩‍👩‍👧‍👦",
    "\x1b[31mred",
    "null",
    "true",
    "NaN",
    "-1",
    "1e999",
    "0x10",
    "'",
    '"',
    "\\",
    "[",
    "{}",
    "${x}",
    "${oc.env:HOME}",
    "???",
    "%s%n",
    "../..",
    "/",
    "/dev/null",
    "~",
    "<s>",
    "<PRE>",
    "x" * 5000,
)
NUMBERS: tuple[int | float, ...] = (
    0,
    1,
    -1,
    2,
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
)
DEEP = 100_000  # more than any parser's stack


def text(rng: random.Random) -> str:
    """One that is unpleasant, or some characters of all of Unicode, surrogates too."""
    if rng.random() < 0.6:
        return rng.choice(TEXTS)
    return "".join(chr(rng.randrange(rng.choice((128, 0x110000)))) for _ in range(rng.randrange(9)))


def number(rng: random.Random) -> int | float:
    """One at a border, or any."""
    return rng.choice((rng.choice(NUMBERS), rng.randrange(-10, 100), rng.uniform(-2, 2)))


def value(rng: random.Random, depth: int = 2) -> Any:
    """What JSON may hold."""
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: number(rng),
        lambda: text(rng),
    ]
    if depth:
        kinds += [
            lambda: [value(rng, depth - 1) for _ in range(rng.randrange(4))],
            lambda: {text(rng): value(rng, depth - 1) for _ in range(rng.randrange(4))},
        ]
    return rng.choice(kinds)()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with one change: a flipped bit, a slice doubled, dropped, overwritten or moved, or another end."""
    if not data:
        return rng.randbytes(rng.randrange(1, 50))
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 2, 4, 8, 64, 512)))
    piece = data[start:end]
    kind = rng.randrange(9)
    if kind == 0:
        return data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
    if kind == 1:
        return data[:start]
    if kind == 2:
        return data[:end] + piece + data[end:]
    if kind == 3:
        return data[:start] + data[end:]
    if kind == 4:
        return data[:start] + rng.randbytes(len(piece)) + data[end:]
    if kind == 5:
        return data[:start] + rng.choice((b"\0", b"\xff")) * len(piece) + data[end:]
    if kind == 6:
        place = rng.randrange(len(data))
        return data[:place] + piece + data[place:]
    if kind == 7:
        return data + rng.randbytes(rng.randrange(1, 20))
    return rng.choice((b"", b"\0" * len(data), rng.randbytes(len(data)), data + data))


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything within a JSON value."""
    listed = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in list(listed):
        yield tree, key
        yield from places(inner)


def changed(tree: Any, rng: random.Random) -> str:
    """Change one place of a JSON value, in place; what was done, in words."""
    container, key = rng.choice(list(places(tree)))
    old = container[key]
    kind = rng.randrange(5)
    if kind == 0:
        del container[key]
        return f"without {key!r}"
    if kind == 1 and isinstance(container, dict):
        container[text(rng)] = container.pop(key)
        return f"{key!r} under another name"
    if kind == 2 and isinstance(old, bool | int | float):
        container[key] = number(rng)
    elif kind == 3 and isinstance(old, str):
        container[key] = text(rng)
    else:
        container[key] = value(rng)
    return f"{key!r}: {old!r:.60} is now {container[key]!r:.60}"


def changed_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON file with one to three places changed; seldom one that is nothing but deep."""
    if rng.random() < 0.02:
        return rng.choice((b"[", b'{"a":')) * DEEP
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if tree:
            changed(tree, rng)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
