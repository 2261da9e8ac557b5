from pathlib import Path

import pytest

from conf.tracker import TrackerConfig
from train.monitor.tracker import Tracker


def test_wandb_that_cannot_be_reached_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Online without a key is the quick one of the failures; a dead server ends in the same exception."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = Tracker(TrackerConfig("online"), out=tmp_path, name="x", settings={}, speaks=True)
    tracker.log(1, {"loss": 2.0})
    tracker.log_table(1, "drafts", ("a", "b"), [("x", 1)])
    tracker.alarm("too high")
    run = tracker.run_id
    tracker.finish()
    told = capsys.readouterr().out
    assert "tracker.mode=online: No API key configured" in told and "goes on offline" in told
    assert "warning: too high" in told
    assert run and list((tmp_path / "wandb").glob(f"offline-run-*-{run}/*.wandb"))


def test_a_log_file_gets_lines_instead_of_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker(TrackerConfig("disabled"), out=Path("."), name="x", settings={}, speaks=True)
    with tracker.progress("dual", done=0, total=2) as show:
        show(1, "loss 3")
        show(2, "loss 2")
    assert capsys.readouterr().out.strip().splitlines() == ["step 2/2 loss 2"]
    silent = Tracker(TrackerConfig("disabled"), out=Path("."), name="x", settings={}, speaks=False)
    silent.tell("nothing")
    assert capsys.readouterr().out == ""
