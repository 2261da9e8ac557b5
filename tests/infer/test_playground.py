"""The playground: two decoders side by side, and its page."""

import pytest

from infer import DecodeConfig, Model
from infer.playground import build, race


def test_both_decoders_write_plain_decodings_text(model: Model) -> None:
    plain = DecodeConfig("plain", max_new_tokens=12)
    hybrid = DecodeConfig("hybrid", max_new_tokens=12)
    *_, (left, right) = race(model, "def f(x):\n    y", [hybrid, plain])
    assert left.tokens == right.tokens == right.forwards == 12 >= left.forwards
    texts = ["".join(text for text, _ in racer.pieces) for racer in (left, right)]
    assert texts[0] == texts[1] != ""
    assert str(right).endswith("1.00 tokens per forward")


def test_the_page_is_built(model: Model) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed")
    assert build(model, "tiny").title == "tiny: playground"
