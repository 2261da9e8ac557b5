"""The solution's room: runs the untrusted program, then answers what the tests ask of it.

All here is in the program's power. That is no matter: what it can say is data, and what it could make this
process say it could have returned as well. It cannot reach the tests, who compare.

    [verb, number, [arguments], {named}]  ->  ["value", value]  or  ["error", exception's name, its text]
"""

import json
import operator
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .wire import decode, encode, read_line

VERBS: dict[str, Callable[..., Any]] = {
    "call": lambda found, *arguments, **named: found(*arguments, **named),
    "get": getattr,
    "item": operator.getitem,
    "contains": operator.contains,
    "length": len,
    "truth": bool,
    "iterate": iter,
    "next": next,
    "show": repr,
}


class Objects:
    """Those that stay here, by number; number 0 is the program itself."""

    def __init__(self, program: ModuleType) -> None:
        self._by_number: list[Any] = [program]
        self._numbers = {id(program): 0}

    def refer(self, value: Any) -> int:
        """The number of an object, the same each time."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._by_number)
            self._by_number.append(value)
        return self._numbers[id(value)]

    def resolve(self, number: int) -> Any:
        """The object of a number."""
        return self._by_number[number]


def main(path: str) -> None:
    """Run the program of a file and serve until the tests have no more questions."""
    questions, answers = os.fdopen(3, "rb"), os.fdopen(4, "wb")
    program = ModuleType("solution")
    sys.modules["solution"] = program  # dataclasses look a class's module up
    objects = Objects(program)
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    reply = _attempt(_run, objects, source, program)
    while True:
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
        try:
            verb, number, arguments, named = json.loads(read_line(questions))
        except EOFError:
            return
        reply = _attempt(_act, objects, objects, verb, number, arguments, named)


def _run(source: str, program: ModuleType) -> None:
    exec(compile(source, "<solution>", "exec", dont_inherit=True), program.__dict__)


def _act(objects: Objects, verb: str, number: int, arguments: list[Any], named: dict[str, Any]) -> Any:
    values = [decode(argument, objects.resolve) for argument in arguments]
    names = {name: decode(value, objects.resolve) for name, value in named.items()}
    return VERBS[verb](objects.resolve(number), *values, **names)


def _attempt(action: Callable[..., Any], objects: Objects, *arguments: Any) -> list[Any]:
    try:
        return ["value", encode(action(*arguments), objects.refer)]
    except BaseException as error:  # SystemExit too: a program that wants to end has answered nothing
        return ["error", type(error).__name__, _text(error)]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ may fail
        return ""
