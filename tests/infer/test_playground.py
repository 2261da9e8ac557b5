"""The playground: two decoders in one thread, their times and texts, and its page."""

from collections.abc import Iterator

import pytest

from infer import DecodeConfig, Model, TextStep
from infer.playground import build, race


def test_both_decoders_write_plain_decodings_text(model: Model) -> None:
    plain = DecodeConfig("plain", max_new_tokens=12)
    hybrid = DecodeConfig("hybrid", max_new_tokens=12)
    *_, (left, right) = race(model, "def f(x):\n    y", [hybrid, plain])
    assert left.tokens == right.tokens == right.forwards == 12 >= left.forwards
    texts = ["".join(text for text, _ in racer.pieces) for racer in (left, right)]
    assert texts[0] == texts[1] != ""
    assert str(right).endswith("1.00 tokens per forward")


def test_the_decoder_that_used_less_time_goes_on(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    now = 0.0
    order = []

    def steps(name: str, seconds: float, count: int) -> Iterator[TextStep]:
        nonlocal now
        for index in range(count):
            now += seconds
            order.append(name)
            yield TextStep(0, [1], 0, 0, index == count - 1, ["x"])

    monkeypatch.setattr("time.perf_counter", lambda: now)
    texts = iter([steps("fast", 1, 4), steps("slow", 3, 2)])
    monkeypatch.setattr("infer.api.generate", lambda *_: next(texts))
    *_, (fast, slow) = race(model, "x", [DecodeConfig(), DecodeConfig()])
    assert order == ["fast", "slow", "fast", "fast", "fast", "slow"]
    assert (fast.seconds, slow.seconds) == (4, 6)


def test_the_page_is_built(model: Model) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed")
    assert build(model, "tiny").title == "tiny: playground"
