"""Damage to bytes, texts and JSON values. Every function draws from the generator that it receives."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

TEXTS = ["", " ", "\0", "\n", "a\nb", "\r\n\t", "\ufeff", "e\u0301", "👩‍👩‍👧‍👦", "\x1b[31mred"]
TEXTS += ["\ud800", "\udcff"]  # a lone surrogate, and how a file name that is no UTF-8 is read
TEXTS += ["\u202etxet", "null", "true", "NaN", "-1", "1e999", "0x10", "'", '"', "\\", "[", "{}", "${x}"]
TEXTS += ["${oc.env:HOME}", "???", "%s%n", "../..", "/", "/dev/null", "~", "<s>", "<PRE>", "x" * 5000]
NUMBERS: list[int | float] = [0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 10**30, 10**400]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
NUMBERS += [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63)]
DEEP = 100_000  # more than any parser's stack


def text(rng: random.Random) -> str:
    """Return an unpleasant text, or some characters of all of Unicode, surrogates included."""
    if rng.random() < 0.6:
        return rng.choice(TEXTS)
    return "".join(chr(rng.randrange(rng.choice((128, 0x110000)))) for _ in range(rng.randrange(9)))


def number(rng: random.Random) -> int | float:
    return rng.choice((rng.choice(NUMBERS), rng.randrange(-10, 100), rng.uniform(-2, 2)))


def value(rng: random.Random, depth: int = 2) -> Any:
    kinds: list[Callable[[], Any]] = [lambda: None, lambda: rng.random() < 0.5]
    kinds += [lambda: number(rng), lambda: text(rng)]
    if depth:
        kinds.append(lambda: [value(rng, depth - 1) for _ in range(rng.randrange(4))])
        kinds.append(lambda: {text(rng): value(rng, depth - 1) for _ in range(rng.randrange(4))})
    return rng.choice(kinds)()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with one change: a flipped bit, a slice doubled, dropped, replaced or moved, another end."""
    if not data:
        return rng.randbytes(rng.randrange(1, 50))
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 2, 4, 8, 64, 512)))
    before, piece, after = data[:start], data[start:end], data[end:]
    moved = rng.randrange(len(data))
    changes: list[Callable[[], bytes]] = [
        lambda: before + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :],
        lambda: before,
        lambda: before + piece + piece + after,
        lambda: before + after,
        lambda: before + rng.randbytes(len(piece)) + after,
        lambda: before + rng.choice((b"\0", b"\xff")) * len(piece) + after,
        lambda: data[:moved] + piece + data[moved:],
        lambda: data + rng.randbytes(rng.randrange(1, 20)),
        lambda: rng.choice((b"", b"\0" * len(data), rng.randbytes(len(data)), data + data)),
    ]
    return rng.choice(changes)()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in list(items):
        yield tree, key
        yield from _places(inner)


def change(tree: Any, rng: random.Random) -> None:
    container, key = rng.choice(list(_places(tree)))
    old, kind = container[key], rng.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[text(rng)] = container.pop(key)
    elif kind == 2 and isinstance(old, bool | int | float):
        container[key] = number(rng)
    elif kind == 3 and isinstance(old, str):
        container[key] = text(rng)
    else:
        container[key] = value(rng)


def changed_json(data: bytes, rng: random.Random) -> bytes:
    """Return a JSON file with one to three places changed; seldom one that is only deep."""
    if rng.random() < 0.02:
        return rng.choice((b"[", b'{"a":')) * DEEP
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if tree:
            change(tree, rng)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
