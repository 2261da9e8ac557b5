"""The benchmarks' own files, where they lie beside the project."""

import re
from collections import Counter
from pathlib import Path

import pytest

from infer.benchmarks import BenchmarkConfig, PromptSetConfig
from infer.benchmarks.prompts import load_prompts
from infer.benchmarks.reading import read_problems
from infer.benchmarks.rows import Problem
from infer.config import Infill
from infer.text import Text


def read(name: str, path: Path, **settings: object) -> list[Problem]:
    return read_problems(name, BenchmarkConfig(path=str(path), **settings))  # type: ignore[arg-type]


def test_humanevals_package_is_the_file_and_its_solutions_are_whole(shared_data: Path) -> None:
    problems = read("humaneval", shared_data / "humaneval" / "HumanEval.jsonl.gz")
    assert problems == read_problems("humaneval", BenchmarkConfig())
    assert len(problems) == 164
    assert {"poly", "encode_cyclic", "encode_shift"} <= set(
        re.findall(r"\w+", "".join(p.known for p in problems))
    )
    for problem in problems:
        program = problem.program(problem.answer or "")
        assert program and program.source == f"{problem.prompt}{problem.answer}\n"  # nothing was cut
        known: dict[str, object] = {}
        exec(program.known, known)
        assert problem.tests.split()[-1] not in {f"check({name})" for name in known}  # that one is to be judged
        compile(program.source + program.tests, problem.id, "exec")


@pytest.mark.parametrize("shots", [3, 0])
def test_mbpps_test_split_and_its_solutions(shared_data: Path, shots: int) -> None:
    problems = read("mbpp", shared_data / "mbpp" / "sanitized-mbpp.json", shots=shots)
    assert len(problems) == 257
    assert len(read("mbpp", shared_data / "mbpp" / "mbpp.jsonl", shots=shots)) == 500
    for problem in problems:
        assert problem.cut(problem.answer or "") == problem.answer
        program = problem.program(problem.answer or "")
        assert program
        compile(program.source + program.tests, problem.id, "exec")


def test_every_language_of_multipl_e_has_its_stops(shared_data: Path) -> None:
    problems = read("multipl_e", shared_data / "multipl_e")
    languages = Counter(problem.language for problem in problems)
    assert len(languages) == 15 and languages["python"] == 164 and languages["go"] == 154
    assert len({(problem.language, problem.id) for problem in problems}) == len(problems) == 2390
    assert all(problem.stop and problem.tests for problem in problems)
    paper = read("multipl_e", shared_data / "multipl_e", languages=["cpp", "java", "php", "ts", "cs", "sh"])
    assert Counter(problem.language for problem in paper)["sh"] == 158


def test_single_lines_are_one_line_each(shared_data: Path) -> None:
    folder = shared_data / "humaneval_infilling"
    problems = read("infilling", folder / "HumanEval-SingleLineInfilling.jsonl.gz")
    assert len(problems) == 1033
    for problem in problems:
        assert isinstance(problem.prompt, Infill) and problem.prompt.order == "spm"
        assert problem.answer and problem.answer.count("\n") == 1 and problem.matches(problem.answer.strip())


@pytest.mark.parametrize(
    ("kind", "file", "settings"),
    [
        ("gsm8k", "gsm8k/test.jsonl", {}),
        ("spec_bench", "spec_bench/question.jsonl", {"max_tokens": 2000}),
        ("alpaca", "alpaca/seed_tasks.jsonl", {}),
        ("multipl_e", "multipl_e", {"max_tokens": 1000}),
        ("infilling", "humaneval_infilling/HumanEval-SingleLineInfilling.jsonl.gz", {"order": "psm"}),
        ("jsonl", "humaneval/HumanEval.jsonl.gz", {"key": "canonical_solution"}),
    ],
)
def test_prompts_of_every_file(
    shared_data: Path, infilling_text: Text, kind: str, file: str, settings: dict[str, object]
) -> None:
    config = PromptSetConfig(kind=kind, path=str(shared_data / file), count=12, **settings)  # type: ignore[arg-type]
    prompts = load_prompts("mine", config, infilling_text, seed=0)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 12
    assert all(bool(prompt.ends) == (kind == "infilling") for prompt in prompts)
