"""The drill that kills stages: that it sees what is wrong, and a short one of the cheapest stage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.facts import difference, facts_of, not_whole
from tests.drills.stages import STAGES

ROOT = Path(__file__).parents[1]
STAGE = STAGES["study"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a stage leaves."""
    out = tmp_path / "run" / "out"
    out.mkdir(parents=True)
    (out / "manifest.json").write_text('{"kind": "study", "created": "today"}')
    (out / "report.json").write_text('{"date": "today", "merging": [1, 2]}')
    return out.parent


def test_two_runs_differ_in_what_is_no_date(run: Path) -> None:
    wanted = facts_of(STAGE, run)
    (run / "out" / "report.json").write_text('{"date": "tomorrow", "merging": [1, 2]}')
    assert not list(difference(facts_of(STAGE, run), wanted))
    (run / "out" / "report.json").write_text('{"date": "today", "merging": [1, 3]}')
    (run / "out" / "manifest.json").unlink()
    (run / ".out.partial").mkdir()
    assert list(difference(facts_of(STAGE, run), wanted)) == [
        ".out.partial is left over",
        "out/manifest.json is missing",
        "out/report.json is another",
    ]


def test_what_is_visible_and_not_whole_is_told(run: Path) -> None:
    wanted, report = facts_of(STAGE, run), run / "out" / "report.json"
    assert not list(not_whole(STAGE, run, wanted))
    (run / ".out.partial").mkdir()
    (run / ".out.partial" / "report.json").write_text("{")
    assert not list(not_whole(STAGE, run, wanted)), "what is hidden may be half written"
    whole = report.read_text()
    report.write_text(whole[:-3])
    (told,) = not_whole(STAGE, run, wanted)
    assert told.startswith("out/report.json is visible and cannot be read")
    report.unlink()
    assert list(not_whole(STAGE, run, wanted)) == ["out/ has a manifest and lacks ['out/report.json']"]
    report.write_text(whole)
    (run / "out" / "manifest.json").unlink()
    assert list(not_whole(STAGE, run, wanted)) == ["out is visible and has no manifest"]
    (run / "out" / "more.json").write_text("{}")
    assert "out/more.json is visible and belongs to no result" in list(not_whole(STAGE, run, wanted))


def test_a_folder_that_is_to_be_filled_may_be_seen_empty(run: Path) -> None:
    """Training was told of its model's folder, which a kill had met right before its first file."""
    wanted = facts_of(STAGE, run) | {"out/model/config.json": "of the result"}
    (run / "out" / "manifest.json").unlink()
    (run / "out" / "report.json").unlink()
    (run / "out" / "model").mkdir()
    assert list(not_whole(STAGE, run, wanted)) == ["out is visible and has no manifest"]
    (run / "out" / "other").mkdir()
    assert "out/other is visible and belongs to no result" in list(not_whole(STAGE, run, wanted))


def test_what_is_seen_before_it_is_finished_can_be_read(tmp_path: Path) -> None:
    """The file of gpu_check grows, and half of one would have passed."""
    (tmp_path / "check.json").write_text('{"finished": false, "par')
    (told,) = not_whole(STAGES["gpu_check"], tmp_path, {})
    assert told.startswith("check.json is visible and cannot be read")
    (tmp_path / "check.json").write_text('{"finished": false}')
    assert not list(not_whole(STAGES["gpu_check"], tmp_path, {}))


def test_data_preparation_killed_at_a_write_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.drills.kills", str(tmp_path), "data_prep-1"]
    run = subprocess.run(
        [*command, "--kills", "2", "--when", "write"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout.splitlines()[-1])["data_prep-1"]
    assert sum(found["kills"].values()) >= 2
    assert found["faults"] == []
