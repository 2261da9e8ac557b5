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

TEXT = {"content": "a\nb\nc\n", "language": "py"}


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
        ("humaneval", [{}], "line 1 must be JSON with a text 'task_id', got the fields of nothing"),
        ("humaneval", [{"task_id": 3}], "line 1 must be JSON with a text 'task_id', got task_id=3"),
        ("humaneval", "[{}, 3]", "a.jsonl, entry 2 must be a JSON object, got int"),
        ("humaneval", "\n\n{\n", "a.jsonl, line 3 must be JSON, got"),
        ("humaneval", "[{", "a.jsonl must be a JSON list, got"),
        ("humaneval", "", "benchmarks.humaneval must have a problem, got none in /"),
        ("humaneval", b"\xff\xfe", "a.jsonl must be a readable file, got 'utf-8' codec"),
        ("multipl_e", [CPP | {"stop_tokens": [1]}], "a list of texts 'stop_tokens', got"),
        ("multipl_e", [CPP | {"tests": "// no main"}], "must have tests of cpp that say where they end"),
        ("multipl_e", [CPP | {"language": ["cpp"]}], r"a text 'language', got language=\['cpp'\]"),
        ("multipl_e", [CPP | {"canonical_solution": 3}], "a text 'canonical_solution', got"),
        ("mbpp", [task(11) | {"test_setup_code": 3}], "a text 'test_setup_code', got"),
        ("mbpp", [task(11) | {"task_id": "x"}], "a whole number 'task_id', got task_id='x'"),
        ("infilling", [LINE | {"suffix": None}], "a text 'suffix', got the fields task_id, prompt,"),
        # JSON can spell half of a surrogate pair: it was a traceback after everything had been measured.
        ("lines", [TEXT, TEXT | {"content": "a\n\ud800\n"}], "line 2: 'content' must be text that UTF-8"),
        ("lines", [TEXT, TEXT | {"language": "a\ud800"}], "line 2: 'language' must be text that UTF-8"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: str | bytes | list[Any], message: str
) -> None:
    """A language that is a list was a TypeError, and a solution or setup that is a number was taken."""
    path = tmp_path / "a.jsonl"
    text = "\n".join(map(json.dumps, content)) if isinstance(content, list) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as error:
        judged(name, str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    """An archive of no bytes was a file of no rows, which a folder of several lost without a word."""
    for content in (gzip.compress(b"x" * 1000)[:20], b""):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} must be a readable file, got"):
            judged("humaneval", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("humaneval", {"order": "psm"}, r"prompts.humaneval.order needs kind infilling.*, got kind humaneval"),
        ("humaneval", {"shots": 0}, "prompts.humaneval.shots needs kind mbpp, got kind humaneval"),
        ("humaneval", {"key": "a"}, "prompts.humaneval.key needs kind jsonl, got kind humaneval"),
        ("mbpp", {"languages": ["py"]}, r"prompts.mbpp.languages needs kind multipl_e, infilling.*, got kind"),
        ("humaneval", {"path": "none.jsonl"}, "prompts.humaneval.path=none.jsonl must be a file .*got no such"),
        ("humanevil", {}, "prompts.humanevil needs prompts.humanevil.path=FILE, or .*humaneval, mbpp"),
        ("xsum", {}, "prompts.xsum.path must be a file, got none. Give prompts.xsum.path=FILE"),
    ],
)
def test_settings_that_a_kind_does_not_have(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_problems(name, PromptSetConfig(**settings))


def test_what_the_files_do_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"benchmarks\.mine\.kind must be one of humaneval, mbpp, .*got none"):
        judged("mine", "a.jsonl")
    with pytest.raises(UserError, match=r"benchmarks\.multipl_e\.path=.*got a folder without them"):
        judged("multipl_e", str(tmp_path))
    path = lines(tmp_path / "a.jsonl", CPP)
    with pytest.raises(UserError, match=r"multipl_e\.languages must be some of cpp, got cobol"):
        judged("multipl_e", path, languages=["cobol", "cpp"])
    with pytest.raises(UserError, match="must have task 2, which is shown as an example, got none"):
        judged("mbpp", lines(tmp_path / "a.jsonl", task(11)), shots=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "zip"}, "prompts.kind must be one of humaneval, mbpp"),
        ({"order": "left"}, "prompts.order must be spm or psm, got left"),
        ({"shots": 4}, "prompts.shots must be 0 to 3, got 4"),
        ({"languages": []}, "prompts.languages must name a language, got none"),
        ({"share": 0.0}, "prompts.share must be above 0 and at most 1, got 0"),
        ({"first": 1.5}, "prompts.first must be above 0 and at most 1, got 1.5"),
        ({"count": 0}, "prompts.count must be at least 1, got 0"),
        ({"truncate": 1}, "prompts.truncate must be at least 2, got 1"),
        ({"truncate": 512, "max_tokens": 9}, "prompts.truncate must be null where max_tokens=9 .* got 512"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptSetConfig(**settings)
    if "kind" in settings or "count" in settings:
        with pytest.raises(ValueError, match=message.replace("prompts", "benchmarks")):
            BenchmarkConfig(**settings)
