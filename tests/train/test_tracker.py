"""Runs of Weights & Biases whose server, network or disk fails. They ended or delayed
the training.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offline_runs import read_runs
from tests.stub_wandb import stub_server

NOWHERE = "http://127.0.0.1:9"  # refuses connections
SCRIPT = """
import resource
import sys
import time
from pathlib import Path

import conf.tracker
from conf.tracker import TrackerConfig
from train.metrics import Tracker

conf.tracker.ONLINE_SECONDS = 4.0
conf.tracker.DISK_SECONDS = 0.0

def full_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

mode, disk, out = sys.argv[1:]
out = Path(out)
out.mkdir(exist_ok=True)
if disk == "full":
    full_disk()
began = time.monotonic()
tracker = Tracker(TrackerConfig(mode), out=out, name="x", settings={"a": 1}, speaks=True)
tracker.log(1, {"loss": 2.0})
assert time.monotonic() - began < 2, "the start of W&B delayed the run"
if disk == "fills":
    while not list(out.glob("wandb/offline-run-*/*.wandb")):
        time.sleep(0.1)
    full_disk()
tracker.log(2, {"loss": 1.0})
tracker.finish()
assert time.monotonic() - began < 20, "the end of W&B delayed the run"
"""


def environment(url: str) -> dict[str, str]:
    """Of a user who is signed in at the server, without the settings of W&B that the
    tests have.
    """
    rest = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    return rest | {
        "WANDB_API_KEY": "a" * 40,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_BASE_URL": url,
    }


def track(
    out: Path, url: str = NOWHERE, *, mode: str = "online", disk: str = "free"
) -> list[str]:
    """Return the lines that a tracked run prints."""
    command = [sys.executable, "-c", SCRIPT, mode, disk, str(out)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment(url)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    return run.stdout.splitlines()


def sync(out: Path, url: str) -> None:
    command = [
        Path(sys.executable).with_name("wandb"),
        "sync",
        *out.glob("wandb/offline-run-*"),
    ]
    # In its own folder: it makes one for its logs.
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(url),
        cwd=out,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("status", "delay", "reason"),
    [
        (404, 0, "returned error 404"),
        (401, 0, "returned error 401"),
        (200, 30, "context deadline exceeded"),
        (0, 0, "connection refused"),
    ],
)
def test_a_server_that_fails_leaves_an_offline_run(
    tmp_path: Path, status: int, delay: float, reason: str
) -> None:
    """The offline run took the id of the online one, which W&B's process still had:
    "run ID x is in use".
    """
    with stub_server(status=status, delay=delay) as server:
        (line,) = track(tmp_path, server.url if status else NOWHERE)
    assert line.startswith("tracker.mode=online: ") and reason in line
    assert (
        f"the run goes on offline. Send it later: wandb sync {tmp_path}/wandb/offline-run-*"
        in line
    )
    ((run_id, run),) = read_runs(tmp_path).items()
    assert [row["item"]["loss"] for row in run["history"] if "loss" in row["item"]] == [
        2.0,
        1.0,
    ]
    # A resumed run goes on with the id that it has online: what it does next does not
    # overwrite this part.
    assert json.loads((tmp_path / "wandb" / "run.json").read_text())["id"] != run_id


def test_an_offline_run_is_sent_later(tmp_path: Path) -> None:
    with stub_server(status=404) as server:
        track(tmp_path, server.url)
    with stub_server() as server:
        sync(tmp_path, server.url)
        (run_id,) = server.runs
        assert [row["loss"] for row in server.history[run_id] if "loss" in row] == [
            2.0,
            1.0,
        ]
        assert server.runs[run_id]["groupName"].startswith("x-")
        assert json.loads(server.runs[run_id]["config"])["a"] == {"value": 1}


@pytest.mark.parametrize("disk", ["full", "fills"])
def test_a_full_disk_turns_it_off(tmp_path: Path, disk: str) -> None:
    """The start ended in a traceback; a disk that filled later lost the rest without a
    word.
    """
    (line,) = track(tmp_path, mode="offline", disk=disk)
    assert line == "tracker: W&B failed (File too large): the run continues without it"
