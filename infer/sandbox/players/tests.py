"""The tests' room: runs a benchmark's own tests, for which the solution is a far thing that answers.

Names that the tests use and that neither they, nor the trusted code beside them, nor Python defines are the
solution's. What it returns is compared here, by this Python: objects of the solution's own kinds equal
nothing but themselves. The last line of descriptor 5 is the verdict.
"""

import ast
import builtins
import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from .wire import decode, encode, read_line


class SolutionError(Exception):
    """An exception that the solution raised and Python does not know."""


class Solution:
    """The other side of the channel."""

    def __init__(self, questions: BinaryIO, answers: BinaryIO) -> None:
        self._questions, self._answers = questions, answers
        self._known: dict[int, Remote] = {}

    def ask(self, verb: str, number: int, *arguments: Any, **named: Any) -> Any:
        """What an object answers. Raises what it raised; where it has gone, all ends."""
        names = {name: encode(value, _number_of) for name, value in named.items()}
        question = [verb, number, [encode(value, _number_of) for value in arguments], names]
        try:
            self._questions.write(json.dumps(question).encode() + b"\n")
            self._questions.flush()
        except BrokenPipeError:
            _gone()
        return self.answer()

    def answer(self) -> Any:
        """The next one of its answers."""
        try:
            line = read_line(self._answers)
        except EOFError:
            _gone()
        match json.loads(line):
            case ["value", found]:
                return decode(found, self._remote)
            case ["error", str(name), str(text)]:
                raise _error(name, text)
        raise SolutionError("it answered something else than a value")

    def _remote(self, number: int) -> "Remote":
        return self._known.setdefault(number, Remote(self, number))


class Remote:
    """An object of the solution's. Equal to itself only: it does not say so, we do."""

    def __init__(self, solution: Solution, number: int) -> None:
        self._solution, self._number = solution, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls it there."""
        return self._solution.ask("call", self._number, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._solution.ask("get", self._number, name)

    def __getitem__(self, key: Any) -> Any:
        return self._solution.ask("item", self._number, key)

    def __contains__(self, value: Any) -> bool:
        return bool(self._solution.ask("contains", self._number, value))

    def __len__(self) -> int:
        return int(self._solution.ask("length", self._number))

    def __bool__(self) -> bool:
        return bool(self._solution.ask("truth", self._number))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._solution.ask("iterate", self._number)
        while True:
            try:
                yield self._solution.ask("next", _number_of(iterator))
            except StopIteration:
                return

    def __repr__(self) -> str:
        return str(self._solution.ask("show", self._number))


def _number_of(value: Any) -> int:
    if not isinstance(value, Remote):
        raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the solution")
    return value._number


def _error(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return SolutionError(f"{name}: {text}")
    try:
        return kind(text)
    except TypeError:  # UnicodeError and its like want more than a text
        return SolutionError(f"{name}: {text}")


def main(path: str) -> None:
    """Run the tests of a file and say how it went."""
    solution = Solution(os.fdopen(4, "wb"), os.fdopen(3, "rb"))
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    try:
        solution.answer()  # to the running of its program
        run(job["tests"], job["known"], solution)
    except Exception as error:
        told = str(error).strip().partition("\n")[0][:200]
        name = "" if isinstance(error, SolutionError) else type(error).__name__
        _say(": ".join(part for part in ("failed", name, told) if part))
    _say("passed")


def run(tests: str, known: str, solution: Solution) -> None:
    """Raises whatever the tests raise; nothing where they pass."""
    space: dict[str, Any] = {"__name__": "tests"}
    exec(compile(known, "<known>", "exec", dont_inherit=True), space)
    for name in solutions_names(tests, set(space)):
        try:
            space[name] = solution.ask("get", 0, name)
        except AttributeError:
            continue  # not defined: the tests define it themselves, or will miss it
    exec(compile(tests, "<tests>", "exec", dont_inherit=True), space)


def solutions_names(tests: str, known: set[str]) -> set[str]:
    """The names that are to be looked for in the solution.

    Never one of Python's own, or a solution could redefine the `abs` that its result is compared with. But
    where tests name nothing else, as those of MBPP 126 do (`assert sum(10, 15) == 6`), what they call is it.
    """
    nodes = list(ast.walk(ast.parse(tests)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - known
    foreign = names - set(dir(builtins))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return foreign or called & names


def _gone() -> None:
    """The solution has ended: at once, or tests that expect some exception would take this for it."""
    _say("gone")


def _say(verdict: str) -> None:
    os.write(5, json.dumps(verdict).encode() + b"\n")
    os._exit(0)
