"""The benchmarks' own files, where they lie beside the project; their authors' own solutions are whole."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infer.benchmarks import BenchmarkConfig, PromptSetConfig
from infer.benchmarks.prompts import load_prompts
from infer.benchmarks.reading import read_problems
from infer.config import Infill
from infer.text import Text

LINES = "humaneval_infilling/HumanEval-SingleLineInfilling.jsonl.gz"


@pytest.mark.parametrize(
    ("kind", "file", "settings", "languages"),
    [
        ("humaneval", "humaneval/HumanEval.jsonl.gz", {}, {"python": 164}),
        ("mbpp", "mbpp/sanitized-mbpp.json", {"shots": 3}, {"python": 257}),
        ("mbpp", "mbpp/sanitized-mbpp.json", {}, {"python": 257}),
        ("mbpp", "mbpp/mbpp.jsonl", {}, {"python": 500}),
        ("infilling", LINES, {}, {"python": 1033}),
        ("multipl_e", "multipl_e", {"languages": ["py", "go", "sh"]}, {"python": 164, "go": 154, "sh": 158}),
    ],
)
def test_solutions_are_whole_and_judged(
    shared_data: Path, kind: str, file: str, settings: dict[str, Any], languages: dict[str, int]
) -> None:
    problems = read_problems(kind, BenchmarkConfig(kind=kind, path=str(shared_data / file), **settings))
    assert Counter(problem.language for problem in problems) == languages
    assert len({(problem.language, problem.id) for problem in problems}) == len(problems)
    if kind == "humaneval":
        assert problems == read_problems("humaneval", BenchmarkConfig())  # of the package
    for problem in problems:
        answer = problem.answer or ""
        if isinstance(problem.prompt, Infill):
            assert problem.prompt.order == "spm" and answer.count("\n") == 1 and problem.matches(answer.strip())
            continue
        assert problem.stop and problem.tests and problem.cut(answer) == answer
        if kind != "multipl_e":
            program, known = problem.program(answer), dict[str, object]()
            exec(program.known, known)
            assert problem.tests.split()[-1] not in {f"check({name})" for name in known}  # which is judged
            compile(program.source + program.tests, problem.id, "exec")


@pytest.mark.parametrize(
    ("kind", "file", "settings"),
    [
        ("gsm8k", "gsm8k/test.jsonl", {}),
        ("spec_bench", "spec_bench/question.jsonl", {"max_tokens": 2000}),
        ("alpaca", "alpaca/seed_tasks.jsonl", {}),
        ("multipl_e", "multipl_e", {"max_tokens": 1000}),
        ("infilling", LINES, {"order": "psm"}),
        ("jsonl", "humaneval/HumanEval.jsonl.gz", {"key": "canonical_solution"}),
    ],
)
def test_prompts_of_every_file(
    shared_data: Path, infilling_text: Text, kind: str, file: str, settings: dict[str, Any]
) -> None:
    config = PromptSetConfig(kind=kind, path=str(shared_data / file), count=12, **settings)
    prompts = load_prompts("mine", config, infilling_text, seed=0)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 12
    assert all(bool(prompt.ends) == (kind == "infilling") for prompt in prompts)
