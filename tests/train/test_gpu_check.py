"""The check of training on a GPU, tried on a CPU: every part in its own process."""

import json
import sys
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace

import pytest
import torch

from conf import UserError, settings
from tests import warm
from train import gpu_check
from train.gpu_check import PARTS, TrainCheckConfig, main

TINY = ["device=cpu", "model=demo", "tokens=64", "steps=1"]


def check(out: Path, *overrides: str) -> dict:
    main(settings("train_check", TrainCheckConfig, [f"out={out}", *TINY, *overrides]))
    return json.loads(out.read_text())


def test_every_part_finishes_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a GPU covered decoding alone: what failed in training showed in the first hour of a run."""
    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(run=warm.run, TimeoutExpired=TimeoutExpired))
    report = check(tmp_path / "deep" / "check.json", "peak_tflops=1")
    parts = report["parts"]
    assert report["finished"] and list(parts) == list(PARTS) and all(part["passed"] for part in parts.values())
    assert parts["attention"]["kernel"] == "dense"
    assert parts["attention"]["gradients_apart"].startswith("not run")
    for objective in ("dual", "branch"):
        assert parts[objective]["step_seconds"] > 0 and parts[objective]["mfu"] > 0
        assert parts[objective]["peak_bytes"] > 0 and parts[objective]["planned_bytes"] > 0
    assert parts["resume"]["resumed_loss"] == parts["resume"]["loss"]
    assert "resume: passed: loss" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["check.json"]


def test_a_part_that_fails_leaves_the_others_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One exception, or a process that a driver killed, ended the check and all that stood behind it."""
    real = gpu_check.command

    def planted(name: str, config: TrainCheckConfig) -> list[str]:
        ends = {"dual": "import os; os._exit(7)", "branch": "raise ValueError('planted')"}
        return [sys.executable, "-c", ends[name]] if name in ends else real(name, config)

    monkeypatch.setattr(gpu_check, "command", planted)
    with pytest.raises(UserError, match=r"got 2 of 3 that failed: dual, branch\. The file says why"):
        check(tmp_path / "check.json", "parts=[dual,branch,optimizer]")
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["finished"] and report["parts"]["optimizer"]["passed"]
    assert report["parts"]["dual"] == {"passed": False, "error": "exit code 7: "}
    assert report["parts"]["branch"]["error"].endswith("ValueError: planted")


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(99)"]
    monkeypatch.setattr(gpu_check, "command", lambda name, config: sleeps)
    with pytest.raises(UserError, match="failed: attention"):
        check(tmp_path / "check.json", "parts=[attention]", "minutes=0.01")
    assert "no result after minutes=0.01" in (tmp_path / "check.json").read_text()


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device must be cpu on a machine without a CUDA device, got cuda"):
            check(tmp_path / "check.json", "device=cuda")
    with pytest.raises(UserError, match="parts must be of attention, .* got speed"):
        check(tmp_path / "check.json", "parts=[speed]")
    with pytest.raises(UserError, match="must be a file in a folder that exists, got a folder"):
        check(tmp_path)
