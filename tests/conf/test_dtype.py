"""dtype=auto: bfloat16 if the device computes in it as fast as in float32."""

import pytest

from conf import dtype
from conf.dtype import choose_dtype


@pytest.mark.parametrize(
    ("cost", "requested", "chosen", "line"),
    [
        (0.5, "auto", "bfloat16", "dtype=auto: bfloat16 (bfloat16 takes 0.5 times as"),
        (70.2, "auto", "float32", "dtype=auto: float32 (bfloat16 takes 70 times as"),
        (70.2, "bfloat16", "bfloat16", "warning: dtype=bfloat16 takes 70 times as"),
        (5.0, "bfloat16", "bfloat16", ""),
        (70.2, "float16", "float16", ""),
    ],
)
def test_auto_takes_the_faster_type_and_says_which(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cost: float,
    requested: str,
    chosen: str,
    line: str,
) -> None:
    """The demo trained 70 times more slowly on a CPU without bfloat16 instructions."""
    monkeypatch.setattr(dtype, "bfloat16_cost", lambda: cost)
    assert choose_dtype(requested, "cpu") == chosen
    printed = capsys.readouterr().err
    assert printed.startswith(line) and printed.count("\n") == bool(line)
