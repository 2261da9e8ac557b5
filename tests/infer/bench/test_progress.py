"""Test the progress of a benchmark in a log file, and the lines before it measures."""

import time

import pytest

from infer.bench import progress as module
from infer.bench.progress import describe, progress


def test_a_log_file_gets_lines_also_within_a_long_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: without a terminal a benchmark printed no line for hours."""
    monkeypatch.setattr(module, "LINE_SECONDS", 0.02)
    with progress("speed", 2) as advance:
        advance()
        time.sleep(0.15)
        advance()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "speed: 0 of 2" and lines[-1] == "speed: 2 of 2"
    assert len(lines) >= 4 and "speed: 1 of 2, about 0 s left" in lines
    with progress("speed", 2, silent=True) as advance:
        advance()
    with progress("nothing to do", 0):
        pass
    assert not capsys.readouterr().out


def test_a_line_says_how_long_it_takes() -> None:
    assert describe("speed", 0, 40, 65.0) == "speed: 0 of 40 in 65 s"
    assert (
        describe("speed", 12, 40, 180.0) == "speed: 12 of 40 in 3 min, about 7 min left"
    )
    assert describe("speed", 40, 40, 9000.0) == "speed: 40 of 40 in 2 h 30 min"
