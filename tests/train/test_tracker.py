"""Test tracking with Weights & Biases: the logged data, and failures of server, network and disk.

Such failures must neither end nor delay the training.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from conf.runs.files import read_json
from conf.runs.tracker import TrackerConfig, keep_within
from infer.bench.report import GSD_SCALARS, log, scalars
from tests import warm
from tests.train.resume_worker import RECIPE
from train.export import ExportConfig
from train.export.__main__ import track as track_export
from train.journal import tracked_rows
from train.metrics import StepLog


def records(file: Path) -> list[dict[str, Any]]:
    """Return all records of a run's log; wait, since W&B may still write after the run has ended."""
    wandb = Path(sys.executable).with_name("wandb")
    command = [wandb, "leet", "inspect", "--json", file]
    for _ in range(20):
        output = subprocess.check_output(command, text=True)
        parts = [json.loads(line) for line in output.splitlines()]
        if any(part["type"] == "exit" for part in parts):
            break
        time.sleep(1)
    return parts


def read_runs(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Return the records of all runs below a folder, by run id and kind.

    Each run must have only one folder for `wandb sync`.
    """
    runs: dict[str, dict[str, list[Any]]] = {}
    for file in sorted(folder.rglob("wandb/offline-run-*/run-*.wandb")):
        parts = records(file)
        (id,) = (part["run"]["run_id"] for part in parts if part["type"] == "run")
        assert id not in runs, "`wandb sync` of the second replaces the first"
        runs[id] = {}
        for part in parts:
            kind = part["type"]
            runs[id].setdefault(kind, []).append(part.get(kind))
    return runs


TINY = [
    item
    for item in RECIPE
    if not item.startswith(("tracker", "steps", "save_every", "validate_every"))
]


def command(module: str, *arguments: str) -> None:
    done = warm.run_ranks(module, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs."""
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture(scope="module")
def runs(data_folder: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a resumed training and of a report that was made twice."""
    tuned, model, report = (folder / name for name in ("tuned", "model", "report"))
    training = [*TINY, "steps=2", "save_every=1", "validate_every=1"]
    training += [f"data.path={data_folder}", f"out={tuned}"]
    command("train", *training)
    (tuned / "manifest.json").unlink()  # as if it had been killed in its second step
    shutil.rmtree(tuned / "checkpoints" / "step-000002")
    time.sleep(1)  # W&B names a run's offline folder by the second
    command("train", *training)
    export = [f"checkpoint={tuned}", f"out={model}"]
    command("train.export", *export)
    bench = ["prompts=[humaneval]", "count=1", "prompt_tokens=1000", "part=speed"]
    bench += ["speed.max_new_tokens=3", "speed.decoders=[ngrams]", "speed.peers=[]"]
    bench += ["speed.rounds=1", "dtype=float32"]
    for _ in range(2):  # the second time everything is already measured
        command("infer.bench", f"model={model}", f"out={report}", *bench)
    return read_runs(folder)


def test_rows_to_restore_are_those_before_the_run(tmp_path: Path) -> None:
    """The tracker's thread read them late, with validations of the run's own: W&B then
    dropped all steps before these, "less than the current step".
    """
    validation = [{"step": 0, "tau_real": 1.0}]
    rows = tracked_rows(
        validation, StepLog(tmp_path / "log.jsonl", step=0), {}, until=0, tokens=1024
    )
    validation.append({"step": 20, "tau_real": 1.5})
    assert list(rows) == [(0, {"tokens_seen": 0, "validation/tau_real": 1.0})]


def of(runs: dict[str, dict[str, Any]], job: str) -> dict[str, Any]:
    (run,) = (run for run in runs.values() if run["run"][0]["job_type"] == job)
    return run


def test_training_and_report_have_one_run_each(
    runs: dict[str, dict[str, Any]],
) -> None:
    """Bug: making a report again started another run."""
    jobs = sorted(run["run"][0]["job_type"] for run in runs.values())
    assert jobs == ["export", "report", "train"]


def test_a_training_has_its_curves_and_texts(runs: dict[str, dict[str, Any]]) -> None:
    rows = [row["item"] for row in of(runs, "train")["history"]]
    curves = {"masked_loss", "accuracy_1", "accuracy_2", "lr", "memory_gib"}
    assert {f"train/{name}" for name in curves} <= rows[1].keys()
    held_out = {"masked_loss", "accuracy_1", "tau_real"}
    for row in rows:
        assert {f"validation/{name}" for name in held_out} <= row.keys()
        table = {name: row[f"validation/texts.{name}"] for name in ("_type", "ncols")}
        assert table == {"_type": "table-file", "ncols": 3}


def test_an_export_keeps_the_trainings_event_files(tmp_path: Path) -> None:
    """Bug: with tracker.mode=tensorboard it removed OUT/tensorboard/ of the training."""
    events = tmp_path / "tensorboard" / "events"
    events.parent.mkdir()
    events.touch()
    tracker = TrackerConfig("tensorboard")
    track_export(
        ExportConfig(str(tmp_path), str(tmp_path / "model"), tracker=tracker), {}
    )
    assert events.is_file()


def test_the_export_and_the_report_are_artifacts(
    runs: dict[str, dict[str, Any]],
) -> None:
    (model,) = of(runs, "export")["artifact"]
    assert (model["type"], model["name"]) == ("model", "model-model")
    files = {entry["path"] for entry in model["manifest"]["contents"]}
    assert {"adaptive.json", "config.json", "model.safetensors"} <= files
    reports = of(runs, "report")["artifact"]
    assert {each["type"] for each in reports} == {"report"}
    files = {entry["path"] for entry in reports[0]["manifest"]["contents"]}
    assert {"report.json", "index.html"} <= files


def test_a_report_with_many_figures_is_an_artifact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: W&B failed, and had no files of a report with more than 100 figures, as of part=gsd.

    The figures were the artifact's metadata, which has at most 100 keys.
    """
    rows = [
        {"prompt_set": "code", "part": "ablation", "setting": f"gsd k={k}"}
        | dict.fromkeys(GSD_SCALARS, 0.5)
        for k in range(30)
    ]
    gsd = {"settings": {}, "rows": rows, "date": "2026-11-28", "commit": "ab"}
    report = {"name": "many", "speed": None, "quality": None, "load": None, "gsd": gsd}
    (tmp_path / "report.json").write_text("{}")
    log(TrackerConfig(mode="offline"), tmp_path, report)
    ((_, run),) = read_runs(tmp_path).items()
    (artifact,) = run["artifact"]
    assert [entry["path"] for entry in artifact["manifest"]["contents"]] == [
        "report.json"
    ]
    assert len(scalars(report)) == 150 and "tracker:" not in capsys.readouterr().err


def test_the_last_folder_has_all_rows_of_a_resumed_training(
    runs: dict[str, dict[str, Any]],
) -> None:
    """Bug: the last folder had only the rows since the resume.

    `wandb sync` of it replaced the earlier rows on the server. The x-axis is tokens_seen.
    """
    run = of(runs, "train")
    drawn = [item for item in run["metric"] if item.get("glob_name") == "*"]
    assert {item["step_metric"] for item in drawn} == {"tokens_seen"}
    rows = [row["item"] for row in run["history"]]
    seen = [row["tokens_seen"] for row in rows if "train/loss" in row]
    assert seen == [8 * 128, 2 * 8 * 128]
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert {"train/lr", "train/tokens_per_second", "train/accepted"} <= rows[1].keys()
    validations = [row for row in rows if "validation/standard_loss" in row]
    assert validations[0] is rows[0]


def test_a_report_has_its_figures(
    folder: Path, runs: dict[str, dict[str, Any]]
) -> None:
    """Bug: the test failed on a busy machine, where marked speeds are not sent."""
    summary: dict[str, float] = {}
    for part in of(runs, "report")["summary"]:
        summary |= part.get("update", {})
    report = read_json(folder / "report" / "report.json")
    assert scalars(report).items() <= summary.items()
    assert summary["speed/humaneval/T0/plain/tokens_per_forward"] == 1.0
    for row in report["speed"]["rows"]:
        row["marks"] = []
    speed = report["speed"]["rows"][0]
    assert speed["decoder"] == "plain"
    assert scalars(report)["speed/humaneval/T0/plain/speedup"] == 1.0
    speed["marks"] = ["machine busy"]
    assert "speed/humaneval/T0/plain/speedup" not in scalars(report)


NOWHERE = "http://127.0.0.1:9"  # refuses connections
SCRIPT = """
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

import conf.runs.tracker
from conf.runs.tracker import TrackerConfig
from train.metrics import Tracker

conf.runs.tracker.ONLINE_SECONDS = 4.0

def kill_children():
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended with its parent
            child.kill()
            child.wait()
    time.sleep(0.5)

mode, event, out = sys.argv[1:]
out = Path(out)
began = time.monotonic()
tracker = Tracker(TrackerConfig(mode), out=out, name="x", settings={"a": 1}, speaks=True)
tracker.log(1, {"loss": 2.0})
assert time.monotonic() - began < 2, "the start of W&B delayed the run"
if event:
    while not list(out.glob("wandb/offline-run-*/*.wandb")):
        time.sleep(0.1)
    kill_children()
tracker.log(2, {"loss": 1.0})
tracker.finish()
assert time.monotonic() - began < 20, "the end of W&B delayed the run"
"""


def environment(url: str) -> dict[str, str]:
    """Return the environment of a signed-in user, without the W&B variables of the test run."""
    rest = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    return rest | {
        "WANDB_API_KEY": "a" * 40,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_BASE_URL": url,
    }


def track(
    out: Path, url: str = NOWHERE, *, mode: str = "online", event: str = "", **env: str
) -> list[str]:
    """Return the lines that a tracked run prints."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, event, str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(url) | env,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    return run.stdout.splitlines()


class Refusal(BaseHTTPRequestHandler):
    """Answers every request of W&B with 404."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def addresses() -> Iterator[dict[str, str]]:
    """Yield the URLs of a server that refuses, one that never answers, and an absent one."""
    here = ("127.0.0.1", 0)
    with socket.create_server(here) as silent, HTTPServer(here, Refusal) as refusing:
        Thread(target=refusing.serve_forever, daemon=True).start()
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        refusing_url = f"http://127.0.0.1:{refusing.server_port}"
        yield {"silent": silent_url, "refusing": refusing_url, "absent": NOWHERE}
        refusing.shutdown()


@pytest.mark.parametrize(
    ("server", "key", "reason"),
    [
        ("refusing", "a" * 40, "returned error 404"),
        ("silent", "a" * 40, "context deadline exceeded"),
        ("absent", "a" * 40, "connection refused"),
        ("absent", "", "No API key configured"),
    ],
)
def test_a_server_that_fails_leaves_an_offline_run(
    addresses: dict[str, str], tmp_path: Path, server: str, key: str, reason: str
) -> None:
    """Bug: "run ID x is in use": the offline run had the id of the online run.

    W&B's process still held that id.
    """
    url = addresses[server]
    (line,) = track(tmp_path, url, WANDB_API_KEY=key, HOME=str(tmp_path))
    assert line.startswith("tracker.mode=online: ") and reason in line
    later = f"Upload it later: wandb sync {tmp_path}/wandb/offline-run-*"
    assert f"the run continues offline. {later}" in line
    ((run_id, run),) = read_runs(tmp_path).items()
    rows = [row["item"] for row in run["history"]]
    assert [row["loss"] for row in rows if "loss" in row] == [2.0, 1.0]
    # A resumed run continues with the online id and does not overwrite this part.
    assert read_json(tmp_path / "wandb" / "run.json")["id"] != run_id


def test_the_folders_of_a_run_are_not_the_next_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: in a sweep the tables of later jobs were staged in the first job's folder."""
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", "mine")
    assert keep_within(tmp_path) == ["WANDB_DATA_DIR"]
    assert os.environ["WANDB_DATA_DIR"] == str(tmp_path / "wandb")
    assert os.environ["WANDB_CACHE_DIR"] == "mine"
    monkeypatch.delenv("WANDB_DATA_DIR")


def test_a_killed_wandb_process_turns_tracking_off(tmp_path: Path) -> None:
    """Bug: a signal to all processes of a job ended W&B, and then the training without saving."""
    (line,) = track(tmp_path, mode="offline", event="killed")
    assert line.startswith("tracker: W&B failed (")
    assert line.endswith("): the run continues without it")


def test_a_writable_home_is_not_needed(tmp_path: Path) -> None:
    """W&B writes to the user's home, which may be read-only."""
    home = tmp_path / "home"
    home.write_text("a file in place of the folder stops root, too")
    assert track(tmp_path / "out", mode="offline", HOME=str(home)) == []
    assert list(tmp_path.glob("out/wandb/offline-run-*/*.wandb"))


def test_wandb_variables_apply_unless_the_setting_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: WANDB_MODE=disabled wrote a run, and WANDB_DIR had no effect."""
    for name in ("MODE", "PROJECT"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    default = TrackerConfig()
    assert (default.mode, default.project) == ("offline", "adaptive-tokens")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for value, mode in {
        "disabled": "disabled",
        "online": "online",
        "dryrun": "offline",
    }.items():
        monkeypatch.setenv("WANDB_MODE", value)
        assert TrackerConfig().mode == mode
    assert TrackerConfig("disabled", "p") == TrackerConfig("disabled", "p", None)
    assert (TrackerConfig("offline").mode, TrackerConfig().project) == (
        "offline",
        "mine",
    )
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(
        ValueError, match="WANDB_MODE must be offline, online or disabled, got of"
    ):
        TrackerConfig()
    monkeypatch.delenv("WANDB_MODE")
    elsewhere = tmp_path / "elsewhere"
    variables = {"WANDB_DIR": str(elsewhere), "WANDB_NAME": "mine"}
    assert track(tmp_path / "out", mode="offline", **variables) == []
    (run,) = read_runs(elsewhere).values()
    assert run["run"][0]["display_name"] == "mine"
    assert os.listdir(tmp_path / "out" / "wandb") == ["run.json"]
