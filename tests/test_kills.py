"""The drill that kills stages: it sees what is wrong, and a short run of it on the cheapest stage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.results import differences, hashes, incomplete
from tests.drills.stages import STAGES

ROOT = Path(__file__).parents[1]
STAGE = STAGES["study"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    out = tmp_path / "run" / "out"
    out.mkdir(parents=True)
    (out / "manifest.json").write_text('{"kind": "study", "created": "today"}')
    (out / "report.json").write_text('{"date": "today", "merging": [1, 2]}')
    return out.parent


def test_two_runs_differ_in_what_is_no_date(run: Path) -> None:
    expected = hashes(STAGE, run)
    (run / "out" / "report.json").write_text('{"date": "tomorrow", "merging": [1, 2]}')
    assert not list(differences(hashes(STAGE, run), expected))
    (run / "out" / "report.json").write_text('{"date": "today", "merging": [1, 3]}')
    (run / "out" / "manifest.json").unlink()
    (run / ".out.partial").mkdir()
    assert list(differences(hashes(STAGE, run), expected)) == [
        ".out.partial is left over",
        "out/manifest.json is missing",
        "out/report.json differs",
    ]


def test_incomplete_results_are_seen(run: Path) -> None:
    expected, report = hashes(STAGE, run), run / "out" / "report.json"
    assert not list(incomplete(STAGE, run, expected))
    (run / ".out.partial").mkdir()
    (run / ".out.partial" / "report.json").write_text("{")
    assert not list(incomplete(STAGE, run, expected)), "a hidden file may be half written"
    whole = report.read_text()
    report.write_text(whole[:-3])
    (fault,) = incomplete(STAGE, run, expected)
    assert fault.startswith("out/report.json is visible and unreadable")
    report.unlink()
    assert list(incomplete(STAGE, run, expected)) == ["out/ has a manifest and lacks ['out/report.json']"]
    report.write_text(whole)
    (run / "out" / "manifest.json").unlink()
    assert list(incomplete(STAGE, run, expected)) == ["out is visible without a manifest"]
    (run / "out" / "more.json").write_text("{}")
    assert "out/more.json is visible and belongs to no result" in list(incomplete(STAGE, run, expected))


def test_a_folder_to_be_filled_may_be_empty(run: Path) -> None:
    """A kill right before the first file of training's model folder counted as a fault."""
    expected = hashes(STAGE, run) | {"out/model/config.json": "of the result"}
    (run / "out" / "manifest.json").unlink()
    (run / "out" / "report.json").unlink()
    (run / "out" / "model").mkdir()
    assert list(incomplete(STAGE, run, expected)) == ["out is visible without a manifest"]
    (run / "out" / "other").mkdir()
    assert "out/other is visible and belongs to no result" in list(incomplete(STAGE, run, expected))


def test_a_growing_file_must_be_readable(tmp_path: Path) -> None:
    """The file of gpu_check grows, and half of one would have passed."""
    (tmp_path / "check.json").write_text('{"finished": false, "par')
    (fault,) = incomplete(STAGES["gpu_check"], tmp_path, {})
    assert fault.startswith("check.json is visible and unreadable")
    (tmp_path / "check.json").write_text('{"finished": false}')
    assert not list(incomplete(STAGES["gpu_check"], tmp_path, {}))


def test_data_preparation_killed_at_a_write_ends_as_if_undisturbed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.drills.kills", str(tmp_path), "data_prep-1"]
    run = subprocess.run(
        [*command, "--kills", "2", "--when", "write"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    outcome = json.loads(run.stdout.splitlines()[-1])["data_prep-1"]
    assert sum(outcome["kills"].values()) >= 2
    assert outcome["faults"] == []
