"""The playground: two decoders in one thread, their times and texts, and its page."""

from collections.abc import Iterator

import pytest

from conf import UserError
from infer import DecodeConfig, Model, TextStep
from infer.playground import Racer, build, race


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_texts_are_plain_decodings(temperature: float, model: Model) -> None:
    decode = DecodeConfig(max_new_tokens=12, temperature=temperature)
    *_, (drafting, plain) = race(model, "def f(x):\n    y", decode)
    assert (
        drafting.tokens == plain.tokens
        and plain.forwards == len(plain.tokens) >= drafting.forwards
    )
    assert "".join(text for text, _ in plain.pieces) == "".join(
        text for text, _ in drafting.pieces
    )


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
    *_, (fast, slow) = race(model, "x", DecodeConfig())
    assert order == ["fast", "slow", "fast", "fast", "fast", "slow"]
    assert (fast.seconds, slow.seconds) == (4, 6)


def test_a_prompt_that_cannot_be_decoded_is_refused(model: Model) -> None:
    with pytest.raises(UserError, match="max_new_tokens"):
        next(race(model, "x", DecodeConfig(max_new_tokens=10**6)))


def test_figures_are_one_line() -> None:
    racer = Racer(
        iter([TextStep(0, [1, 2], 1, 1, True, ["a", "b"], sources=("text",))])
    )
    racer.advance()
    assert str(racer).startswith("2 tokens, ") and str(racer).endswith(
        "2.00 tokens per forward"
    )
    assert racer.pieces == [("a", "text"), ("b", None)]


def test_the_page_is_built(model: Model) -> None:
    pytest.importorskip(
        "gradio", reason="gradio is not installed (the extra playground)"
    )
    assert build(model, "tiny").title == "tiny: playground"
