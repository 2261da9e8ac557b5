"""A report of names that others gave to benchmarks and languages."""

from pathlib import Path
from typing import Any

import pytest

from infer.report.terminal import print_report
from infer.report.write import write
from tests.infer.report.report_fixture import quality, speed, write_parts

NAMES = ["$x_$", "[/b]x", "half \ud800", "\x1b]0;title\x07", "<script>", "a|b"]


def renamed(value: Any, name: str) -> Any:
    """Every benchmark, language and prompt set, with `name` before its own."""
    if isinstance(value, dict):
        keys = ("language", "benchmark", "prompt_set")
        return {key: name + one if key in keys else renamed(one, name) for key, one in value.items()}
    return [renamed(one, name) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", NAMES)
def test_any_name_can_be_reported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished evaluation of a language "$x_$", "[/b]x" or with half a surrogate pair ended in a traceback of
    matplotlib, rich or the CSV's encoding, and so did every later run.
    """
    single = speed(sets=("humaneval",), temperatures=(0.0,))
    write_parts(tmp_path, speed=renamed(single, name), quality=renamed(quality(), name))
    print_report(write(tmp_path))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and shown.encode()
    assert (tmp_path / "index.html").is_file() and (tmp_path / "quality.csv").is_file()
    assert "<script>" not in (tmp_path / "index.html").read_text()
