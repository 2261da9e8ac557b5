import os
import pwd
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from conf.tracker import TrackerConfig
from train.metrics import Tracker


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
    """W&B writes to the user's home, which may be closed or, in a container, absent."""
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
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    tracker.log_folder(tmp_path / "folder", "folder")
    tracker.finish()
    assert list((tmp_path / "out").glob("wandb/offline-run-*/*.wandb"))
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "closed", "folder"}


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
