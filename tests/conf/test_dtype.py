"""dtype=auto: bfloat16 where the device computes in it as fast as in float32."""

import pytest

from conf import dtype
from conf.dtype import bfloat16_cost, choose_dtype


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> float:
    monkeypatch.setattr(dtype, "bfloat16_cost", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("cost", "requested", "chosen", "line"),
    [
        (
            0.5,
            "auto",
            "bfloat16",
            "dtype=auto: bfloat16 (bfloat16 takes 0.5 times as long as float32 on this ",
        ),
        (
            70.2,
            "auto",
            "float32",
            "dtype=auto: float32 (bfloat16 takes 70 times as long as float32 on this ",
        ),
        (
            70.2,
            "bfloat16",
            "bfloat16",
            "warning: dtype=bfloat16 takes 70 times as long as float32 on this ",
        ),
        (5.0, "bfloat16", "bfloat16", ""),
        (70.2, "float32", "float32", ""),
        (70.2, "float16", "float16", ""),
    ],
    indirect=["cost"],
)
def test_auto_takes_the_faster_type_and_says_which(
    capsys: pytest.CaptureFixture[str],
    cost: float,
    requested: str,
    chosen: str,
    line: str,
) -> None:
    """The demo trained in bfloat16 on a CPU without instructions for it, 70 times more slowly."""
    assert choose_dtype(requested, "cpu") == chosen
    printed = capsys.readouterr().err
    assert printed.startswith(line)
    assert printed.count("\n") == (line != "")


def test_only_the_first_rank_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    choose_dtype("auto", "cpu")
    assert capsys.readouterr().err == ""


def test_the_cost_is_measured_once() -> None:
    assert bfloat16_cost() == bfloat16_cost() > 0
