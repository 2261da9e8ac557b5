"""Every distinct answer judged once, whoever gave it: equal texts have equal verdicts.

All answers are there before the first is judged: programs that run beside a model would slow each other
down, and a time limit would decide on what was only late. Programs slow each other down too: one that the
clock on the wall stopped is judged again, alone, and that verdict counts.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infer.benchmarks.problem import Problem
from infer.engine.sampling import seed_from
from infer.quality.answers import Answer, completion
from infer.sandbox.program import Program, Verdict

TOGETHER = 32  # verdicts that are kept together
LATE = re.compile(r"timed out after \S+ s")  # by the clock on the wall, not "of computing"
TOO_LONG = "failed: the prompt leaves no room for an answer in the model's context"


class Judge(Protocol):
    """What executes programs: the sandbox."""

    def judge_all(self, programs: Sequence[Program], workers: int) -> list[Verdict]:
        """In the order of the programs."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One text as the answer to one problem."""

    key: str
    problem: Problem
    text: str


def key_of(benchmark: str, language: str, answer: Answer) -> str:
    """Return what answers of one problem and one text have in common."""
    return f"{seed_from(benchmark, language, answer['id'], completion(answer)):016x}"


def cases(
    benchmarks: Mapping[str, Sequence[Problem]], units: Iterable[Mapping[str, Any]]
) -> Iterator[list[Case]]:
    """Return the distinct cases among the answers of `units`, in order, in lists that are stored together."""
    known = {
        (name, problem.language, problem.id): problem
        for name, problems in benchmarks.items()
        for problem in problems
    }
    by_digest: dict[str, Case] = {}
    for unit in units:
        where = unit["benchmark"], unit["language"]
        for answer in unit["answers"]:
            if not answer["too_long"]:
                key = key_of(*where, answer)
                by_digest.setdefault(key, Case(key, known[*where, answer["id"]], completion(answer)))
    all_cases = list(by_digest.values())
    return (all_cases[at : at + TOGETHER] for at in range(0, len(all_cases), TOGETHER))


def digest(judged: Iterable[Case]) -> str:
    """Return what tells lists of cases apart: an answer whose file was damaged may be another the next time."""
    return hashlib.sha256("".join(case.key for case in judged).encode()).hexdigest()[:8]


def judge(judged: Sequence[Case], sandbox: Judge | None, workers: int) -> dict[str, list[Any]]:
    """Return [passed, reason] by key: by execution where the problem has tests, else by exact match."""
    programs = [case.problem.program(case.text) for case in judged]
    executed = [program for program in programs if program is not None]
    assert sandbox or not executed, "nothing is executed without a sandbox"
    verdicts = iter(sandbox.judge_all(executed, workers) if sandbox and executed else ())
    return {
        case.key: _matched(case) if program is None else _told(next(verdicts))
        for case, program in zip(judged, programs, strict=True)
    }


def late_ones(judged: Iterable[Case], verdicts: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Those that a busy machine may have kept from their verdict."""
    return [case for case in judged if LATE.fullmatch(verdicts[case.key][1])]


def _told(verdict: Verdict) -> list[Any]:
    return [verdict.passed, verdict.reason]


def _matched(case: Case) -> list[Any]:
    same = case.problem.matches(case.text)
    return [same, "exact match" if same else f"no match: expected {(case.problem.answer or '').strip()!r}"]
