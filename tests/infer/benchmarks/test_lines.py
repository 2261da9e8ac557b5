"""Lines that are missing in files of one's own."""

import json
from pathlib import Path

import pytest

from conf import UserError
from infer.benchmarks import BenchmarkConfig
from infer.benchmarks.reading import read_problems
from infer.config import Infill


def test_one_line_of_every_text_is_missing_and_the_same_one_each_time(tmp_path: Path) -> None:
    texts = ["a = 1\n\nb = 2\r\n  c = 3\nd = 4", "too\nshort\n", "x\n\ny\n", "p\n  q\nr\n"]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"content": text, "language": "py"}) + "\n" for text in texts))
    config = BenchmarkConfig(kind="lines", path=str(file))
    problems = read_problems("mine", config)
    assert problems == read_problems("mine", config)
    wholes, missing = [], []
    for item in problems:
        assert isinstance(item.prompt, Infill) and item.prompt.order == "spm" and item.language == "python"
        wholes.append(f"{item.prompt.prefix}{item.answer}{item.prompt.suffix}")
        missing.append((item.answer or "").strip())
        assert item.matches(f"{missing[-1]}  \n") and not item.matches(missing[-1] + "x")
        assert item.program("") is None
    assert wholes == [texts[0], texts[3]]
    assert missing[0] in ("b = 2", "c = 3") and missing[1] == "q"


@pytest.mark.parametrize("field", ["content", "language"])
def test_half_of_a_surrogate_pair_is_refused_with_its_row(tmp_path: Path, field: str) -> None:
    """JSON can spell it: it was a traceback, of a language after everything had been measured."""
    row = {"content": "a\nb\nc\n", "language": "py"}
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {field: "a\nb\n\ud800\n"}) + "\n")
    with pytest.raises(UserError, match=rf"mine\.jsonl, line 2: '{field}' must be text that UTF-8 can hold"):
        read_problems("mine", BenchmarkConfig(kind="lines", path=str(file)))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_of_no_bytes_is_refused(tmp_path: Path, suffix: str) -> None:
    """It was a file of no rows, which a folder of several benchmarks lost without a word."""
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b"")
    (tmp_path / "b.jsonl").write_text(json.dumps({"content": "a\nb\nc\n"}))
    with pytest.raises(UserError, match=f"a.jsonl{suffix} must be .* got an archive of no bytes"):
        read_problems("mine", BenchmarkConfig(kind="lines", path=str(tmp_path)))
