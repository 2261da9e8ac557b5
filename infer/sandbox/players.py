"""What runs in the rooms for Python programs: the solution in one, its tests in another, and data between them.

    players.py solution QUESTIONS ANSWERS     runs solution.py, then answers what the tests ask
    players.py tests ANSWERS QUESTIONS        runs the tests of job.json, and prints the verdict

The numbers are descriptors. Messages are lines of JSON:

    [verb, number, [arguments], {named}]  ->  ["value", value]  or  ["error", exception's name, its text]

Values are plain data, never code: what JSON has (None, bool, str, finite floats, integers of up to 53 bits,
lists) as it is, the rest as {"tag": content}; "object" is the number of an object that stays in the solution's
room. A value of a type derived from a plain one (Counter, named tuple, IntEnum) is sent as the plain one:
whatever its methods would say in a comparison, only the data is sent.

All in the solution's room is in the program's power. That does no harm: it can say nothing but data, which the
tests compare in their own room.
"""

import ast
import builtins
import importlib
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, BinaryIO

_EXACT = 1 << 53
_GROUPS: dict[str, Any] = {kind.__name__: kind for kind in (tuple, set, frozenset)}
_SCALARS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {  # kind, to text, from text
    "int": (int, hex, lambda text: int(text, 16)),
    "float": (float, lambda value: repr(float(value)), float),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, lambda value: repr(complex(value)), complex),
}


def encode_value(value: Any, refer: Callable[[Any], int]) -> Any:
    """Return what stands for a value in JSON; `refer` numbers one that is no plain data, or raises."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and -_EXACT < value < _EXACT:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list):
        return [encode_value(item, refer) for item in list.__iter__(value)]
    if isinstance(value, dict):
        pairs = zip(dict.keys(value), dict.values(value), strict=True)
        return {"dict": [[encode_value(key, refer), encode_value(item, refer)] for key, item in pairs]}
    if isinstance(value, range):
        return {"range": [encode_value(part, refer) for part in (value.start, value.stop, value.step)]}
    for tag, kind in _GROUPS.items():
        if isinstance(value, kind):
            return {tag: [encode_value(item, refer) for item in kind.__iter__(value)]}
    for tag, (kind, to_text, _) in _SCALARS.items():
        if isinstance(value, kind):
            return {tag: to_text(value)}
    if (type(value).__module__, type(value).__name__) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return {type(value).__name__: str(value)}
    return {"object": refer(value)}


def decode_value(message: Any, resolve: Callable[[int], Any]) -> Any:
    """Return the value; `resolve` returns the object of a number.

    Raises ValueError, TypeError or KeyError for what stands for no value.
    """
    if isinstance(message, list):
        return [decode_value(item, resolve) for item in message]
    if not isinstance(message, dict):
        return message
    ((tag, content),) = message.items()
    if tag == "object":
        return resolve(content)
    if tag == "dict":
        return {decode_value(key, resolve): decode_value(item, resolve) for key, item in content}
    if tag == "range":
        return range(*decode_value(content, resolve))
    if tag in _GROUPS:
        return _GROUPS[tag](decode_value(item, resolve) for item in content)
    if tag in ("Decimal", "Fraction"):  # rare, and slow to import
        return getattr(importlib.import_module("decimal" if tag == "Decimal" else "fractions"), tag)(content)
    return _SCALARS[tag][2](content)


def send(channel: BinaryIO, message: Any) -> None:
    """Send a message. Raises BrokenPipeError where the other side has gone."""
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def receive(channel: BinaryIO) -> Any:
    """Return the next message. Raises EOFError where the other side has gone."""
    line = channel.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)


VERBS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "item": operator.getitem,
    "contains": operator.contains,
    "length": len,
    "truth": bool,
    "iterate": iter,
    "next": next,
    "show": repr,
}


def serve_solution(questions: BinaryIO, answers: BinaryIO) -> None:
    """Run the program and answer until the tests have no more questions."""
    program = ModuleType("solution")
    sys.modules["solution"] = program  # dataclasses look a class's module up
    objects: list[Any] = [program]
    numbers = {id(program): 0}

    def refer(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def run() -> None:
        with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
            source = file.read()
        exec(compile(source, "<solution>", "exec", dont_inherit=True), program.__dict__)

    def act(verb: str, number: int, arguments: list[Any], named: dict[str, Any]) -> Any:
        values = [decode_value(argument, objects.__getitem__) for argument in arguments]
        names = {name: decode_value(value, objects.__getitem__) for name, value in named.items()}
        return VERBS[verb](objects[number], *values, **names)

    def attempt(action: Callable[..., Any], *arguments: Any) -> list[Any]:
        try:
            return ["value", encode_value(action(*arguments), refer)]
        except BaseException as error:  # SystemExit too: a program that wants to end has answered nothing
            try:
                return ["error", type(error).__name__, str(error)]
            except Exception:  # its own __str__ fails
                return ["error", type(error).__name__, ""]

    reply = attempt(run)
    while True:
        send(answers, reply)
        try:
            question = receive(questions)
        except EOFError:
            return
        reply = attempt(act, *question)


class SolutionError(Exception):
    """An exception that the solution raised and Python does not know."""


class Solution:
    """The solution as its tests see it; `gone` is called where it has ended, and does not return."""

    def __init__(self, answers: BinaryIO, questions: BinaryIO, gone: Callable[[], None]) -> None:
        self._answers, self._questions, self._gone = answers, questions, gone
        self._remotes: dict[int, Remote] = {}

    def ask(self, verb: str, number: int, *arguments: Any, **named: Any) -> Any:
        """Return what an object answers. Raises what it raised."""
        names = {name: encode_value(value, _number_of) for name, value in named.items()}
        question = [verb, number, [encode_value(value, _number_of) for value in arguments], names]
        try:
            send(self._questions, question)
        except BrokenPipeError:
            self._gone()
        return self.answer()

    def answer(self) -> Any:
        """Return the next of its answers."""
        try:
            message = receive(self._answers)
        except EOFError:
            self._gone()
        match message:
            case ["value", value]:
                return decode_value(
                    value, lambda number: self._remotes.setdefault(number, Remote(self, number))
                )
            case ["error", str(name), str(text)]:
                raise _error(name, text)
        raise SolutionError("it answered something else than a value")


def _forward(verb: str) -> Callable[..., Any]:
    return lambda remote, *arguments, **named: remote._solution.ask(verb, remote._number, *arguments, **named)


class Remote:
    """An object of the solution's. Equal to itself only: it does not say so, we do."""

    def __init__(self, solution: Solution, number: int) -> None:
        self._solution, self._number = solution, number

    __call__, __getattr__, __getitem__ = map(_forward, ("call", "get", "item"))
    __contains__, __len__, __bool__, __repr__ = map(_forward, ("contains", "length", "truth", "show"))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._solution.ask("iterate", self._number)
        while True:
            try:
                yield self._solution.ask("next", _number_of(iterator))
            except StopIteration:
                return


def _number_of(value: Any) -> int:
    if not isinstance(value, Remote):
        raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the solution")
    return value._number


def _error(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # UnicodeError and its like want more than a text
            return kind(text)
    return SolutionError(f"{name}: {text}")


def run_tests(answers: BinaryIO, questions: BinaryIO) -> None:
    """Run the tests and print how it went, behind a word that only the sandbox knows."""
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)

    def say(verdict: str) -> None:
        os.write(1, f"\n{job['word']}{verdict}".encode())
        os._exit(0)

    # Where the solution has gone all ends at once, or tests that expect some exception would take this for it.
    solution = Solution(answers, questions, lambda: say("gone"))
    try:
        solution.answer()  # to the running of its program
        _run_tests(job["tests"], job["known"], solution)
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:200]
        name = "" if isinstance(error, SolutionError) else type(error).__name__
        say(": ".join(part for part in ("failed", name, text) if part))
    say("passed")


def _run_tests(tests: str, known: str, solution: Solution) -> None:
    space: dict[str, Any] = {"__name__": "tests"}
    exec(compile(known, "<known>", "exec", dont_inherit=True), space)
    for name in _names_of_solution(tests, set(space)):
        with suppress(AttributeError):  # not defined: the tests define it themselves, or will miss it
            space[name] = solution.ask("get", 0, name)
    exec(compile(tests, "<tests>", "exec", dont_inherit=True), space)


def _names_of_solution(tests: str, known: set[str]) -> set[str]:
    """Return the names of the tests that are looked for in the solution.

    Never one of Python's own, or a solution could redefine the `abs` that its result is compared with. But
    where tests name nothing else, as those of MBPP 126 do (`assert sum(10, 15) == 6`), what they call is the
    solution's.
    """
    nodes = list(ast.walk(ast.parse(tests)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - known
    foreign = names - set(dir(builtins))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return foreign or called & names


if __name__ == "__main__":
    _, role, incoming, outgoing = sys.argv
    play = {"solution": serve_solution, "tests": run_tests}[role]
    play(os.fdopen(int(incoming), "rb"), os.fdopen(int(outgoing), "wb"))
