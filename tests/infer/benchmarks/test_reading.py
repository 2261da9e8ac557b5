"""Benchmarks by the settings that name them: how many, and what is mistaken in settings and files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from conf import UserError
from infer.benchmarks import BenchmarkConfig, PromptSetConfig
from infer.benchmarks.reading import read_problems
from tests.infer.benchmarks.test_kinds import CPP, LINE, judged, lines, task


def test_so_many_of_each_language_as_the_seed_says(tmp_path: Path) -> None:
    rows = [CPP | {"name": str(n), "language": language} for n in range(9) for language in ("cpp", "rs")]
    path = lines(tmp_path / "a.jsonl", *rows)

    def drawn(seed: int, count: int = 3) -> list[tuple[str, str]]:
        result = read_problems("multipl_e", BenchmarkConfig(path=path, count=count), seed=seed)
        return [(item.language, item.id) for item in result]

    assert drawn(0) == drawn(0) != drawn(1)
    assert [language for language, _ in drawn(0)].count("cpp") == 3 == len(drawn(0)) / 2
    assert drawn(0) == sorted(drawn(0), key=lambda item: [(r["language"], r["name"]) for r in rows].index(item))
    assert len(drawn(0, count=100)) == 18


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("humaneval", "{}\n", "a.jsonl, line 1 must be JSON with a text 'task_id', got the fields of nothing"),
        ("humaneval", '{"task_id": 3}\n', "a.jsonl, line 1 must be JSON with a text 'task_id', got task_id=3"),
        ("humaneval", "[{}, 3]", "a.jsonl, entry 2 must be a JSON object, got int"),
        ("humaneval", "\n\n{\n", "a.jsonl, line 3 must be JSON, got"),
        ("humaneval", "[{", "a.jsonl must be a JSON list, got"),
        ("humaneval", "", "benchmarks.humaneval must have a problem, got none in /"),
        ("humaneval", b"\xff\xfe", "a.jsonl must be a readable file, got 'utf-8' codec"),
        ("multipl_e", json.dumps(CPP | {"stop_tokens": [1]}), "a list of texts 'stop_tokens', got"),
        (
            "multipl_e",
            json.dumps(CPP | {"tests": "// no main"}),
            "line 1 must have tests of cpp that say where they end",
        ),
        ("multipl_e", json.dumps(CPP | {"language": ["cpp"]}), r"a text 'language', got language=\['cpp'\]"),
        ("multipl_e", json.dumps(CPP | {"canonical_solution": 3}), "a text 'canonical_solution', got"),
        ("infilling", json.dumps(LINE | {"language": {}}), "a text 'language', got language={}"),
        ("mbpp", json.dumps(task(11) | {"test_setup_code": 3}), "a text 'test_setup_code', got"),
        ("mbpp", json.dumps(task("x")), "a whole number 'task_id', got task_id='x'"),  # type: ignore[arg-type]
        ("infilling", json.dumps(LINE | {"suffix": None}), "a text 'suffix', got the fields task_id, prompt,"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    """A language that is a list was a TypeError, and a solution or setup that is a number was taken."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as text:
        judged(name, str(path))
    assert "\n" not in str(text.value)


def test_an_example_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must have task 2, which is shown as an example, got none"):
        judged("mbpp", lines(tmp_path / "a.jsonl", task(11)), shots=3)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(UserError, match=f"{name} must be a readable file, got"):
        judged("humaneval", str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("humaneval", {"order": "psm"}, r"prompts.humaneval.order needs kind infilling.*, got kind humaneval"),
        ("humaneval", {"shots": 0}, "prompts.humaneval.shots needs kind mbpp, got kind humaneval"),
        ("humaneval", {"key": "a"}, "prompts.humaneval.key needs kind jsonl, got kind humaneval"),
        (
            "mbpp",
            {"languages": ["py"]},
            r"prompts.mbpp.languages needs kind multipl_e, infilling.*, got kind mbpp",
        ),
        ("gsm8k", {"share": 0.5}, "prompts.gsm8k.share needs kind jsonl, got kind gsm8k"),
        ("humaneval", {"path": "none.jsonl"}, "prompts.humaneval.path=none.jsonl must be a file .*got no such"),
        ("humanevil", {}, "prompts.humanevil needs prompts.humanevil.path=FILE, or .*humaneval, mbpp"),
        ("xsum", {}, "prompts.xsum.path must be a file, got none. Give prompts.xsum.path=FILE"),
    ],
)
def test_settings_that_a_kind_does_not_have(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as text:
        read_problems(name, PromptSetConfig(**settings))
    assert "\n" not in str(text.value)


def test_a_benchmark_of_no_kind_a_folder_without_files_and_a_language_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"benchmarks\.mine\.kind must be one of humaneval, mbpp, .*got none"):
        judged("mine", "a.jsonl")
    with pytest.raises(UserError, match=r"benchmarks\.multipl_e\.path=.*got a folder without them"):
        judged("multipl_e", str(tmp_path))
    path = lines(tmp_path / "a.jsonl", CPP)
    with pytest.raises(UserError, match=r"multipl_e\.languages must be some of cpp, got cobol"):
        judged("multipl_e", path, languages=["cobol", "cpp"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "zip"}, "prompts.kind must be one of humaneval, mbpp"),
        ({"order": "left"}, "prompts.order must be spm or psm, got left"),
        ({"shots": 4}, "prompts.shots must be 0 to 3, got 4"),
        ({"languages": []}, "prompts.languages must name a language, got none"),
        ({"share": 0.0}, "prompts.share must be a share above 0"),
        ({"count": 0}, "prompts.count must be at least 1, got 0"),
        ({"max_tokens": 0}, "prompts.max_tokens must be at least 1, got 0"),
        ({"truncate": 1}, "prompts.truncate must be at least 2 tokens, got 1"),
        ({"truncate": 512, "max_tokens": 9}, "prompts.truncate must be null where max_tokens=9 .* got 512"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptSetConfig(**settings)
    if "kind" in settings or "count" in settings:
        with pytest.raises(ValueError, match=message.replace("prompts", "benchmarks")):
            BenchmarkConfig(**settings)
