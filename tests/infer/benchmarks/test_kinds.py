"""Rows of every kind to problems, and what is reported of rows and files that are not what was wanted."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infer.benchmarks import BenchmarkConfig, PromptSetConfig
from infer.benchmarks.kinds import HUMANEVAL_STOP, ZERO_SHOT_STOP
from infer.benchmarks.reading import read_problems
from infer.benchmarks.rows import Problem
from infer.config import Infill

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def f(x):\n    """One more."""\n',
    "entry_point": "f",
    "canonical_solution": "    return x + 1\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}
LINE = {
    "task_id": "L0",
    "prompt": "def f():\n",
    "suffix": "    return x\n",
    "canonical_solution": "    x = 1\n",
}
CPP = {
    "name": "HumanEval_0_f",
    "language": "cpp",
    "prompt": "long f(long x) {\n",
    "tests": "}\nint main() { assert(f(1) == 2); }\n",
    "stop_tokens": ["\n}"],
}


def task(id: int) -> dict[str, Any]:
    code, tests = f"def f{id}(x):\r\n  return x", [f"assert f{id}(1) == 1", f"assert f{id}(2) == 2"]
    return {"task_id": id, "prompt": f"Task {id}.", "code": code, "test_imports": [], "test_list": tests}


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def judged(name: str, path: str, **settings: Any) -> list[Problem]:
    return read_problems(name, BenchmarkConfig(path=path, **settings))


def requested(name: str, path: str | None, **settings: Any) -> list[Problem]:
    return read_problems(name, PromptSetConfig(path=path, **settings))


def passes(problem: Problem, completion: str) -> bool:
    """Run here: the answers are this file's own."""
    program = problem.program(completion)
    assert program is not None
    exec(program.known, {})  # it stands by itself
    names: dict[str, Any] = {}
    try:
        exec(program.source + program.tests, names)
    except AssertionError:
        return False
    return True


def test_humaneval(tmp_path: Path) -> None:
    (problem,) = judged("humaneval", lines(tmp_path / "a.jsonl", HUMANEVAL))
    assert (problem.id, problem.prompt, problem.language) == ("HumanEval/0", HUMANEVAL["prompt"], "python")
    assert problem.stop == HUMANEVAL_STOP
    assert passes(problem, problem.answer or "") and not passes(problem, "    return x\n")
    assert passes(problem, "    return x + 1\n\nprint(f('no number'))")
    # With the function that is judged among the known names, a stub was judged instead of the answer.
    helper = "import math\n\ndef half(x):\n    return x / 2\n\n\n"
    row = HUMANEVAL | {"prompt": helper + HUMANEVAL["prompt"]}
    assert [item.known for item in judged("humaneval", lines(tmp_path / "a.jsonl", row, HUMANEVAL))] == [
        helper,
        "",
    ]


def test_infilling_in_both_orders(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", LINE, LINE | {"language": "java"}, LINE | {"language": "java"})
    first, second, third = judged("infilling", path)
    assert first.prompt == Infill("def f():\n", "    return x\n", "spm")
    assert first.matches("x = 1") and not first.stop and first.program("x = 1") is None
    assert [item.language for item in (first, second)] == ["python", "java"]
    assert [second.id, third.id] == ["L0", "L0#2"]
    assert judged("psm", path, kind="infilling", order="psm")[0].prompt.order == "psm"
    assert judged("infilling", path, languages=["java"]) == [second, third]


def test_one_line_of_every_text_is_missing_and_the_same_one_each_time(tmp_path: Path) -> None:
    texts = ["a = 1\n\nb = 2\r\n  c = 3\nd = 4", "too\nshort\n", "x\n\ny\n", "p\n  q\nr\n"]
    path = lines(tmp_path / "a.jsonl", *({"content": text, "language": "py"} for text in texts))
    problems = judged("mine", path, kind="lines")
    assert problems == judged("mine", path, kind="lines")
    for text, missing, item in zip((texts[0], texts[3]), (("b = 2", "c = 3"), ("q",)), problems, strict=True):
        assert isinstance(item.prompt, Infill) and item.prompt.order == "spm" and item.language == "python"
        assert f"{item.prompt.prefix}{item.answer}{item.prompt.suffix}" == text
        assert str(item.answer).strip() in missing and item.program("") is None


def test_multipl_e_of_a_folder(tmp_path: Path) -> None:
    lines(tmp_path / "humaneval-cpp.jsonl", CPP)
    lines(tmp_path / "humaneval-go.jsonl", CPP | {"language": "go_test.go"})
    python = {"task_id": "P/0", "prompt": HUMANEVAL["prompt"], "test": "assert f(1) == 2", "stop_tokens": []}
    lines(tmp_path / "humaneval-python.jsonl", python)
    (tmp_path / "LICENSE").write_text("MIT")
    cpp, go, own = judged("multipl_e", str(tmp_path))
    assert [item.language for item in (cpp, go, own)] == ["cpp", "go", "python"]
    assert cpp.stop == ("\n}",) and own.stop == HUMANEVAL_STOP
    assert passes(own, "    return x + 1\n") and not passes(own, "    return x\n")
    assert judged("multipl_e", str(tmp_path), languages=["py", "cpp"]) == [cpp, own]


@pytest.mark.parametrize("shape", ["list", "lines", "gz", "parquet"])
def test_mbpp_shows_three_solved_tasks_and_asks_those_of_the_test_split(tmp_path: Path, shape: str) -> None:
    rows = [task(id) for id in (2, 3, 4, 10, 11, 510, 511)]
    path = tmp_path / f"mbpp.{ {'list': 'json', 'lines': 'jsonl', 'gz': 'jsonl.gz'}.get(shape, shape) }"
    text = json.dumps(rows) if shape == "list" else "\n".join(map(json.dumps, rows))
    if shape == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if shape == "gz" else text.encode())
    first, last = judged("mbpp", str(path), shots=3)
    assert [first.id, last.id] == ["MBPP/11", "MBPP/510"]
    printed = (
        "Your code should pass these tests:\n\nassert f4(1) == 1\nassert f4(2) == 2\n[BEGIN]\ndef f4(x):\n"
    )
    assert isinstance(first.prompt, str) and printed + "  return x\n[DONE]\n\nYou are" in first.prompt
    assert first.prompt.count("[DONE]") == 3 and first.prompt.endswith("assert f11(2) == 2\n[BEGIN]\n")
    assert passes(first, "def f11(x):\n  return x\n[DONE]\nno Python") and not passes(first, "def f11(x): pass")
    (alone, _) = judged("mbpp", str(path))
    assert str(alone.prompt).endswith('\nassert f11(1) == 1\nassert f11(2) == 2\n"""\n')
    assert alone.stop == ZERO_SHOT_STOP
    assert passes(alone, "def f11(x):\n  return x\nassert f11(1) == 7")

    sanitized = task(11) | {"test_imports": ["import math"], "test_list": ["assert math.isnan(f11(math.nan))"]}
    whole = task(12) | {"text": "Task.", "test_setup_code": "one = 1", "test_list": ["assert f12(one) == 1"]}
    del whole["prompt"], whole["test_imports"]
    problems = judged("mbpp", lines(tmp_path / "a.jsonl", sanitized, whole), shots=0)
    assert all(passes(item, item.answer or "") for item in problems)


@pytest.mark.parametrize(
    ("kind", "row", "prompt", "category"),
    [
        ("gsm8k", {"question": "1 + 1?"}, "Question: 1 + 1?\nAnswer:", ""),
        ("spec_bench", {"question_id": 1, "category": "qa", "turns": ["Who?", "And?"]}, "Who?", "qa"),
        ("spec_bench", {"question_id": 1, "category": "stem", "turns": ["Why?"]}, "Why?", "mt_bench"),
        ("xsum", {"document": "Long."}, "Article: Long.\nSummary:", ""),
        ("wmt14", {"translation": {"de": "Ja", "en": "Yes"}}, "English: Yes\nGerman:", ""),
        ("wmt14", {"en": "Yes"}, "English: Yes\nGerman:", ""),
        ("jsonl", {"prompt": "a\nb\nc\nd\n"}, "a\nb\nc\nd\n", ""),
    ],
)
def test_prompts_without_tests(
    tmp_path: Path, kind: str, row: dict[str, Any], prompt: str, category: str
) -> None:
    (problem,) = requested("mine", lines(tmp_path / "a.jsonl", row), kind=kind)
    assert (problem.prompt, problem.category, problem.program("x")) == (prompt, category, None)


def test_alpaca_has_an_input_or_none_and_any_text_a_share(tmp_path: Path) -> None:
    seed = {"instruction": "Sum up.", "instances": [{"input": "A text.", "output": "."}]}
    path = lines(tmp_path / "a.jsonl", seed, {"instruction": "Say {so}.", "input": ""})
    with_input, without = (str(item.prompt) for item in requested("alpaca", path))
    assert with_input.endswith("### Instruction:\nSum up.\n\n### Input:\nA text.\n\n### Response:")
    assert without.endswith("### Instruction:\nSay {so}.\n\n### Response:") and "further context" not in without
    path = lines(tmp_path / "a.jsonl", {"content": "a\nb\nc\nd\n"}, {"content": "one"})
    result = requested("mine", path, key="content", share=0.5)
    assert [(item.id, item.prompt) for item in result] == [("a/1", "a\nb\n"), ("a/2", "one")]
