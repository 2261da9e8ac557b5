"""Test part=quality of infer.bench: questions, answers, verdicts, and the files for other harnesses."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from conf.errors import UserError
from conf.text.rows import read_rows
from infer import load
from infer.bench import quality, sandbox
from infer.bench.held_out import read_documents
from infer.bench.problems import Problem, read_languages, read_problems
from infer.bench.quality import BATCH_SIZE, QualityPart, in_batches, in_order, judge
from infer.bench.run import bench
from infer.config import Infill
from infer.models.checkpoint import ModelDirectory
from infer.prompts import humaneval_file
from tests.conftest import write_rows
from tests.infer.bench.test_bench import configured, read_report


def test_an_answer_to_no_prompt_is_not_passed() -> None:
    """Regression: an empty answer could pass where the expected one was blank."""
    shared = {"benchmark": "lines", "who": "model", "decoder": "plain"}
    item = {**shared, "id": "a", "fits": False, "key": "k"}
    problem = Problem("a", "", expected="x", one_line=True)
    part = mock.Mock(_judged=["lines"], _problems={("lines", "a"): problem})
    verdict = QualityPart._verdict(part, item, {"k": {"passed": True}})
    assert verdict["passed"] is verdict["uncut"] is False
    assert QualityPart._verdict(part, item | {"fits": True}, {"k": {}}) == {}
    assert not QualityPart._verdict(part, item | {"benchmark": "mbpp"}, {})


def test_problems_of_a_batch_have_the_same_stop_strings() -> None:
    """Bug: all answers of a batch ended at the stop strings of its first problem."""
    stops = ["a"] * (BATCH_SIZE + 2) + ["b"] + ["a"] * 2
    problems = [Problem(str(at), "", (stop,)) for at, stop in enumerate(stops)]
    batches = list(in_batches(problems))
    assert [problem for _, batch in batches for problem in batch] == problems
    assert [int(batch[0].id) for _, batch in batches] == [at for at, _ in batches]
    assert all(len({problem.stop for problem in batch}) == 1 for _, batch in batches)
    assert [len(batch) for _, batch in batches] == [BATCH_SIZE, 2, 1, 2]


def test_answers_are_written_as_each_harness_reads_them(
    model_dir: Path, tmp_path: Path
) -> None:
    task = {"text": "Add one.", "code": "", "test_list": ["assert f(1) == 2"]}
    rows = ({"task_id": id, **task} for id in (10, 11))
    mbpp = write_rows(tmp_path / "mbpp", rows)
    holes = {"prompt": "a = ", "suffix": "\nb", "canonical_solution": "1"}
    infilling = write_rows(tmp_path / "infilling", [{"task_id": "i", **holes}])
    fields = {"language": "lua", "prompt": "f", "tests": "t", "stop_tokens": ["\nend"]}
    multipl_e = write_rows(tmp_path / "multipl_e", [{"name": "m", **fields}])
    overrides = [
        "part=quality",
        "quality.humaneval=false",
        f"quality.mbpp={mbpp}",
        f"quality.infilling={infilling}",
        f"quality.multipl_e=[{multipl_e}]",
        "quality.lines=null",
        "quality.decoders=[plain]",
    ]
    bench(configured(model_dir, mbpp, tmp_path / "out", *overrides))
    folder = tmp_path / "out" / "quality" / "solutions"

    def keys(name: str) -> set[str]:
        (row,) = read_rows(folder / f"{name}-model-plain.jsonl")
        return row.keys()

    assert keys("mbpp") == {"task_id", "solution"}
    assert keys("infilling") == {"task_id", "completion"}
    file = folder / "multipl_e-lua-model-plain" / "m.json.gz"
    row = json.loads(gzip.decompress(file.read_bytes()))
    assert row.pop("completions") and row == {"name": "m", **fields}


def test_answers_are_judged_once_bubblewrap_is_installed(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the repeated command said that the part was finished, and the answers were never judged."""
    problem = ["part=quality", "quality.problems=1", "quality.lines=null"]
    config = configured(model_dir, tmp_path, tmp_path / "out", *problem)

    def values() -> set[float | None]:
        bench(config)
        return {
            row["value"] for row in read_report(tmp_path / "out")["quality"]["rows"]
        }

    monkeypatch.setattr(sandbox, "unavailable", lambda: "judging needs bwrap.")
    assert values() == {None}
    monkeypatch.setattr(sandbox, "unavailable", lambda: "")
    monkeypatch.setattr(sandbox, "judge", lambda *_: sandbox.Verdict("passed"))
    monkeypatch.setattr(quality, "answer", mock.Mock(side_effect=AssertionError))
    assert values() == {1.0}
    monkeypatch.setattr(QualityPart, "load", mock.Mock(side_effect=AssertionError))
    assert values() == {1.0}


def test_every_canonical_solution_of_humaneval_passes() -> None:
    if reason := sandbox.unavailable():
        pytest.skip(reason)
    solutions = [row["canonical_solution"] for row in read_rows(humaneval_file())[:8]]
    for problem, solution in zip(read_problems("humaneval", ""), solutions):
        assert judge(problem, problem.answer(solution))["passed"]


def test_a_chat_model_is_asked_for_its_programs(
    model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(model_dir, folder)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    problem = read_problems("humaneval", "")[0]
    asked = problem.as_chat(folder)
    text = ModelDirectory(folder).text.decode(asked.prompt)  # type: ignore[arg-type]
    assert text.startswith("user: Please provide a self-contained Python script")
    # The line end of the fence was left to the model.
    assert problem.prompt.strip() in text and text.endswith("```python\n")
    solution = next(iter(read_rows(humaneval_file())))["canonical_solution"]
    program = asked.answer(f"{problem.prompt}{solution}\n```\nThis adds ```")
    assert program == f"{problem.prompt}{solution}".strip().replace("\n\n\n", "\n")
    if not sandbox.unavailable():
        assert judge(asked, program)["passed"]
    task = {"text": "Add.", "code": "def f(x): 0", "test_list": ["assert f(1)", "f(2)"]}
    file = write_rows(tmp_path / "mbpp.jsonl", [{"task_id": 11, **task}])
    asked = read_problems("mbpp", str(file))[0].as_chat(folder)
    text = ModelDirectory(folder).text.decode(asked.prompt)  # type: ignore[arg-type]
    assert (
        '```\n"""\nAdd.\nassert f(1)\n"""\n```\n' in text and asked.entry_point == "f"
    )
    overrides = ["part=quality", "quality.lines=null"]
    bench(configured(folder, tmp_path, tmp_path / "out", *overrides))
    rows = read_report(tmp_path / "out")["quality"]["rows"]
    assert [row["same"] == row["compared"] for row in rows] == [True, True]


def test_one_line_answers_are_judged_by_their_first_line(tmp_path: Path) -> None:
    """Regression: exact lines counted as wrong if the model wrote more lines after them."""
    hole = {"prompt": "a = ", "suffix": "\nb"}
    one = [
        {"name": "x", "language": language, **hole, "canonical_solution": "1\n"}
        for language in ("py", "java", "js")
    ]
    file = str(write_rows(tmp_path / "one.jsonl", one))
    found = read_languages("infilling", [file])
    assert list(found) == ["infilling-py", "infilling-java", "infilling-js"]
    (java,) = found["infilling-java"]
    assert judge(java, "1\nb\n") == {
        "passed": True,
        "reason": "exact match",
        "uncut": False,
    }
    spans = [
        {"task_id": str(at), **hole, "canonical_solution": text}
        for at, text in enumerate(("1\n", "1\n2\n"))
    ]
    problem = read_problems("infilling", str(write_rows(tmp_path / "s.jsonl", spans)))[
        0
    ]
    assert not judge(problem, "1\nb\n")["passed"] and not problem.one_line


def test_an_order_that_no_family_has_published_can_be_measured(
    model_dir: Path, tmp_path: Path
) -> None:
    text = ModelDirectory(model_dir).text
    assert text._infilling is not None
    text._infilling = replace(text._infilling, orders=("psm",))
    hole = Problem("x", Infill("a", "b"), expected="c")
    own, psm, spm = (in_order(text, hole, order) for order in (None, "psm", "spm"))
    assert own == psm and own.prompt != spm.prompt


def test_both_orders_are_benchmarks_of_one_report(
    model_dir: Path, tmp_path: Path
) -> None:
    rows = [{"id": str(at), "content": f"a = {at}\nb\nc\n"} for at in range(2)]
    file = write_rows(tmp_path / "lines", rows)
    asked = ["part=quality", f"quality.lines={file}", "quality.order=both"]
    asked += ["quality.humaneval=false", "quality.decoders=[plain]"]
    bench(configured(model_dir, file, tmp_path / "out", *asked))
    scored = read_report(tmp_path / "out")["quality"]["rows"]
    assert [row["benchmark"] for row in scored] == ["lines-psm", "lines-spm"]
    assert [row["problems"] for row in scored] == [2, 2]


def test_the_loss_of_documents_is_the_models_and_the_bases(
    model_dir: Path, tmp_path: Path
) -> None:
    texts = ["def f(n):\n    return n\n", "", "import os\n" * 40, "x"]
    rows = [{"id": str(at), "content": text} for at, text in enumerate(texts)]
    file = write_rows(tmp_path / "held_out.jsonl", rows)
    asked = ["part=quality", f"quality.held_out={file}", "quality.lines=null"]
    asked += ["quality.humaneval=false", f"base={model_dir}", "prompt_tokens=24"]
    asked += ["quality.problems=null"]
    bench(configured(model_dir, file, tmp_path / "out", *asked))
    part = read_report(tmp_path / "out")["quality"]
    model = load(model_dir, "float32", "cpu")
    ids = [model.text.encode(text)[:24] for text in texts]
    scores = [
        model.lm(torch.tensor([each])).logits[0].log_softmax(-1)[at, token].item()
        for each in ids
        for at, token in enumerate(each[1:])
    ]
    assert [row["who"] for row in part["rows"]] == ["model", "base"]
    for row in part["rows"]:
        assert row["value"] == pytest.approx(-sum(scores) / len(scores))
        assert row["tokens"] == len(scores)
        assert row["problems"] == sum(len(each) > 1 for each in ids)
    assert list(part["content"]) == ["held_out"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "quality.held_out must have documents, got"),
        ({"id": 1}, "quality.held_out: prompts must have"),
        ({"content": ""}, "got 1 row without a text of two tokens"),
    ],
)
def test_a_file_without_documents_has_no_loss(
    row: dict[str, object], message: str, model_dir: Path, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match=message):
        read_documents(str(file), ModelDirectory(model_dir).text, count=None, most=9)


def test_languages_of_a_folder_are_benchmarks_of_their_own(tmp_path: Path) -> None:
    row = {"name": "m", "task_id": "x", "prompt": "f", "tests": "t", "stop_tokens": []}
    for language in ("cpp", "sh"):
        write_rows(tmp_path / f"{language}.jsonl", [row | {"language": language}])
    found = read_languages("multipl_e", [str(tmp_path)])
    assert list(found) == ["multipl_e-cpp", "multipl_e-sh"]
    python = {"task_id": "Python/0", "prompt": "f", "test": "t", "stop_tokens": []}
    file = str(write_rows(tmp_path / "python.jsonl", [python]))
    ((problem,),) = read_languages("multipl_e", [file]).values()
    assert (problem.id, problem.row["language"]) == ("Python_0", "py")
    assert problem.row["tests"] == "t"
    Path(file).unlink()
    with pytest.raises(UserError, match="must have one file for each language"):
        read_languages("multipl_e", [str(tmp_path), str(tmp_path / "sh.jsonl")])


def test_a_folder_of_other_benchmarks_is_no_benchmark(tmp_path: Path) -> None:
    """Bug: single lines and spans of a folder were one score."""
    row = {"task_id": "a", "prompt": "x", "suffix": "y", "canonical_solution": "z"}
    write_rows(tmp_path / "lines.jsonl", [row])
    with pytest.raises(UserError, match="must be a file of this benchmark"):
        read_languages("infilling", [str(tmp_path)])


def test_an_empty_document_has_no_line(tmp_path: Path) -> None:
    """Bug: it ended the command: "a row of id, content without 'text'"."""
    rows = [{"id": "a", "content": ""}, {"id": "b", "content": "1\n2\n3\n"}]
    file = str(write_rows(tmp_path / "rows.jsonl", rows))
    ((problem,),) = read_languages("lines", [file]).values()
    assert problem.id == "b"
