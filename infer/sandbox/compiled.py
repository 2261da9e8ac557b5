"""Programs of other languages: compiled, if need be, and run with their tests in one room."""

import re
import secrets

from conf import UserError
from infer.sandbox.guard.job import Job, Limits, Step
from infer.sandbox.languages import LANGUAGES, Language, command, folder_of, jars, missing_toolchain, tools
from infer.sandbox.program import Program, Verdict
from infer.sandbox.python import ENVIRONMENT, reason
from infer.sandbox.room import Room

_COMPLAINS = re.compile("error|exception|assert|panic|fail", re.IGNORECASE)


def judge(program: Program, *, level: str, limits: Limits, group: str = "") -> Verdict:
    """Whether it ends well, having printed at the end of its tests what only they could know.

    Raises UserError where the language cannot be judged here.
    """
    if missing := missing_toolchain(program.language):
        raise UserError(f"language {program.language}: wanted {missing}, found none on this machine")
    language, word = LANGUAGES[program.language], secrets.token_hex(16)
    steps, trees = _steps(language)
    files = {language.file: program.source + language.mark(program.tests, word)}
    report = Room(Job(level, steps, limits, trees, files, players={}, cgroup=group)).report()
    done = report.ended == "exited" and report.code == 0 and word in report.output
    if done and not (language.fails and language.fails in report.output):
        return Verdict(True, "passed", report.seconds)
    if report.ended == "exited" and report.step < len(steps) - 1:
        return Verdict(False, "does not compile", report.seconds)
    if done or report.ended == "exited" and report.code:
        return Verdict(False, f"failed: {_complaint(report.output) or f'code {report.code}'}", report.seconds)
    return Verdict(False, reason(report), report.seconds)


def _steps(language: Language) -> tuple[list[Step], list[str]]:
    steps: list[Step] = []
    trees: list[str] = []
    # A tool may be a script for another: tsc begins with "#!/usr/bin/env node".
    path = ":".join(dict.fromkeys([*map(folder_of, tools(language)), ENVIRONMENT["PATH"]]))
    environment = ENVIRONMENT | language.environment | {"PATH": path}
    for words in (language.compile, language.run):
        if words:
            found, needed = command(words)
            steps.append(Step(found, environment, language.address_space))
            trees += needed
    if "{jars}" in " ".join(language.run):
        trees += jars()
    return steps, trees


def _complaint(output: str) -> str:
    """The line in which a program says what went wrong, as far as one can tell."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if _COMPLAINS.search(line)), "")[:200]
