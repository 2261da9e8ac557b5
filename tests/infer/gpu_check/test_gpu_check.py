"""The check of a GPU, tried on a CPU."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from conf import UserError, settings
from infer.gpu_check import GpuCheckConfig, parity, run
from infer.gpu_check.__main__ import main

TINY = ["device=cpu", "shapes=[tiny]", "k=[2]", "context=40", "rounds=3", "prompts=2", "compile=false"]
PARITY = [{"decoder": "tree", "sampling": "greedy", "dtype": "float32", "passed": True}]  # measured for seconds


def check(out: Path, *overrides: str) -> None:
    main(settings("gpu_check", GpuCheckConfig, [f"out={out}", *TINY, *overrides]))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(parity, "NEW", 10)
    monkeypatch.setattr(run, "ROWS", (1, 2, 5))
    monkeypatch.setattr(run, "TURNS", 1)
    return monkeypatch


def test_the_report_holds_hardware_parity_and_times(
    tmp_path: Path, short: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(tmp_path / "a" / "check.json", "dtype=float32")
    report = json.loads((tmp_path / "a" / "check.json").read_text())
    assert report["hardware"]["name"] and report["versions"]["torch"] and report["date"]
    assert {row["dtype"] for row in report["parity"]} == {"float32", "bfloat16", "float16"}
    assert all(row["passed"] for row in report["parity"])
    assert report["finished"]
    tiny = report["shapes"]["tiny"]
    assert list(tiny["rows_ms"]) == ["1", "2", "5"]
    assert list(tiny["loops_ms"]) == ["plain", "two-forward k=2", "one-forward k=2"]
    assert all(ms["low"] <= ms["median"] <= ms["high"] for ms in tiny["loops_ms"].values())
    assert tiny["plain_share_of_roofline"] > 0
    assert "two-forward k=2" in capsys.readouterr().out


def test_a_token_that_differs_fails_the_check_and_the_report_is_written(
    tmp_path: Path, short: pytest.MonkeyPatch
) -> None:
    real = parity._texts

    def wrong(lm, new, *args, **settings):  # one token of one decoder
        texts = real(lm, new, *args, **settings)
        if new is parity.DECODERS["tree"]:
            texts[-1][-1] ^= 1
        return texts

    short.setattr(parity, "_texts", wrong)
    with pytest.raises(
        UserError, match=r"got others in \d+ of 51 that differ, the first tree, greedy, float32"
    ):
        check(tmp_path / "check.json")
    report = json.loads((tmp_path / "check.json").read_text())
    assert {row["decoder"] for row in report["parity"] if not row["passed"]} == {"tree"}


def test_a_check_that_was_ended_early_says_so(tmp_path: Path, short: pytest.MonkeyPatch) -> None:
    """A kill between parity and times left a file that looked finished but for what it lacked."""
    short.setattr(run, "check_parity", lambda **_: PARITY)
    short.setattr(run, "bandwidth", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        check(tmp_path / "check.json")
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["parity"] and report["finished"] is False


@pytest.mark.parametrize("part", ["parity", "bytes_per_second", "tiny"])
def test_a_part_that_fails_leaves_the_others_their_results(
    part: str, tmp_path: Path, short: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first exception ended the check: a kernel that failed in parity left no time of anything."""
    name = {"parity": "check_parity", "bytes_per_second": "bandwidth", "tiny": "random_model"}[part]
    short.setattr(run, "check_parity", lambda **_: PARITY)
    short.setattr(run, name, Mock(side_effect=RuntimeError("planted")))
    with pytest.raises(UserError, match=rf"got 1 that failed, the first {part} \(RuntimeError: planted\)"):
        check(tmp_path / "check.json", "dtype=float32")
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["finished"] and report["failed"] == {part: "RuntimeError: planted"}
    assert bool(report["parity"]) == (part != "parity")
    assert bool(report["bytes_per_second"]) == (part != "bytes_per_second")
    assert ("tiny" in report["shapes"]) == (part != "tiny")
    if part == "bytes_per_second":
        assert report["shapes"]["tiny"]["plain_share_of_roofline"] is None
    assert f"{part} failed: RuntimeError: planted" in capsys.readouterr().out


def test_a_compiler_that_fails_leaves_graphs_without_it(tmp_path: Path, short: pytest.MonkeyPatch) -> None:
    """compile=true ended in Inductor's traceback, though graphs without it would have run."""

    def broken(function, **settings):
        def fail(*args):
            raise RuntimeError("no C compiler")

        return fail

    short.setattr(torch, "compile", broken)
    rows = parity.check_parity(device="cpu", prompts=2, compile=True)
    compiled = next(row for row in rows if row["decoder"] == "compiled tree")
    assert compiled["passed"]
    assert compiled["fell_back"] == "compile=true failed (RuntimeError: no C compiler): going on without it"


def test_mistakes_are_reported(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device=cuda needs a CUDA device, got none"):
            check(tmp_path / "check.json", "device=cuda")
    with pytest.raises(UserError, match="must be a file in a folder that exists, got a folder"):
        check(tmp_path)
    with pytest.raises(UserError, match="shapes must be some of .*got 70b"):
        check(tmp_path / "check.json", "shapes=[70b]")


def test_a_place_that_cannot_be_is_reported_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback after all had been measured, which was lost."""
    monkeypatch.setattr(run, "check_parity", None)
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "check.json", tmp_path / "file" / "deeper" / "check.json"):
        with pytest.raises(UserError, match=f"^out={out} must be a path that the system can open, got"):
            check(out)
        with pytest.raises(UserError, match=f"^out={out} must be a file in a folder that exists, got no"):
            main(GpuCheckConfig(str(out), device="cpu"))
