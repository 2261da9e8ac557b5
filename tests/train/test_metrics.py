import os
import pwd
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from conf.tracker import TrackerConfig
from train.metrics import Tracker, describe_validation
from train.validation import sample_drafts


def test_a_validation_stays_on_one_line_whatever_the_window() -> None:
    """objective.L=500 printed 500 percentages."""
    accuracies = {f"accuracy_{offset}": 1 / (1 + offset) for offset in range(501)}
    metrics = {"standard_loss": 1.0, "masked_loss": 2.0, "accepted": 1.5, **accuracies}
    line = describe_validation(metrics)
    assert line.endswith(
        "accuracy by offset 50 33 25 20 17 14 12 11 10 9 ... 0 (the last of 500) %"
    )
    ten = {
        "standard_loss": 1.0,
        "masked_loss": 2.0,
        "accepted": 1.5,
        **dict(list(accuracies.items())[:11]),
    }
    assert describe_validation(ten).endswith("11 10 9 %")


def test_the_widest_windows_are_shown_with_what_decoding_knows() -> None:
    """The trunk is 0..5; a_1 of the wide window stands at position 2, so that token 2 is known."""
    batch = {
        "ids": torch.tensor([[0, 1, 2, 3, 4, 5, 9, 9, 9]]),
        "positions": torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2, 3]]),
        "offsets": torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 2]]),
        "labels": torch.tensor([[1, 2, 3, 4, 5, -100, 2, 3, 4]]),
    }
    predicted = torch.tensor([[1, 2, 3, 4, 5, -100, 7, 3, 8]])

    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    assert sample_drafts(batch, predicted, count=1, decode=decode) == [
        ("0 1 2", "3 8", "3 4", 1)
    ]
    rows = sample_drafts(batch, predicted, count=9, decode=decode)
    assert rows[1] == ("0 1", "7", "2", 0) and len(rows) == 2


def test_wandb_without_a_key_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = Tracker(
        TrackerConfig("online"), out=tmp_path, name="x", settings={}, speaks=True
    )
    tracker.log(1, {"loss": 2.0})
    tracker.log_table(1, "drafts", ("a", "b"), [("x", 1)])
    tracker.alarm("too high")
    tracker.finish()
    message = capsys.readouterr().out
    assert (
        "tracker.mode=online: No API key configured" in message
        and "goes on offline" in message
    )
    assert "warning: too high" in message
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("home", ["closed", None])
def test_no_home_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """W&B stages tables in the user's home. Where that cannot be written, the first validation was a traceback,
    and for a user without one, as in a container, the start was.
    """
    if home:
        (tmp_path / home).write_text("a file is in its place, which stops root too")
        monkeypatch.setenv("HOME", str(tmp_path / home))
    else:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError))
    for name in (
        "WANDB_DATA_DIR",
        "WANDB_CACHE_DIR",
        "HOME",
    ):  # whatever is set is taken back
        monkeypatch.setitem(os.environ, name, os.environ.get(name, ""))
        if name != "HOME" or not home:
            del os.environ[name]
    monkeypatch.chdir(tmp_path)
    tracker = Tracker(
        TrackerConfig("offline"),
        out=tmp_path / "out",
        name="x",
        settings={},
        speaks=True,
    )
    tracker.log_table(1, "drafts", ("a", "b"), [("x", 1)])
    tracker.finish()
    assert list((tmp_path / "out" / "wandb" / "artifacts" / "staging").iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "closed"}


def test_a_log_file_gets_lines_instead_of_a_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracker = Tracker(
        TrackerConfig("disabled"), out=Path("."), name="x", settings={}, speaks=True
    )
    with tracker.progress("dual", done=0, total=2) as show:
        show(1, "loss 3")
        show(2, "loss 2")
    assert capsys.readouterr().out.strip().splitlines() == ["step 2/2 loss 2"]
    silent = Tracker(
        TrackerConfig("disabled"), out=Path("."), name="x", settings={}, speaks=False
    )
    silent.tell("nothing")
    assert capsys.readouterr().out == ""


KILLED = """
import sys
import time
from pathlib import Path
import psutil
from conf.tracker import TrackerConfig
from train.metrics import Tracker

tracker = Tracker(TrackerConfig("offline"), out=Path(sys.argv[1]), name="x", settings={}, speaks=True)
tracker.log(1, {"loss": 2.0})
run = tracker.run_id
while not list(Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    time.sleep(0.1)
for child in psutil.Process().children(recursive=True):
    child.kill()
    child.wait()
for step in range(2, 5):
    time.sleep(0.3)  # it hears of it soon
    tracker.log(step, {"loss": 2.0})
tracker.log_table(5, "drafts", ("a", "b"), [("x", 1)])
tracker.alarm("too high")
tracker.finish()
assert run and tracker.run_id == run
"""


def test_wandbs_process_may_be_killed(tmp_path: Path) -> None:
    """Training died of it, unsaved: a signal to all processes of a job ends W&B's too."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    # Neither the mode of the tests nor the process of W&B that this one has.
    environment = {
        name: value for name, value in os.environ.items() if "WANDB" not in name
    }
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert (
        run.stdout.count("tracker: W&B failed") == 1
        and "warning: too high" in run.stdout
    )
