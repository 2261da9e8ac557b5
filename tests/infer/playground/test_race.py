"""The playground without a browser: two decoders in one thread, their times and texts."""

import time
from collections.abc import Iterator

import pytest

from conf import UserError
from infer import DecodeConfig, Infill, Model, TextStep, generate
from infer.playground import race as module
from infer.playground.race import DECODERS, Racer, decode_of, race, verdict


def test_both_texts_are_plain_decodings(model: Model) -> None:
    prompts = ["def f(x):\n    y", Infill("def add(a, b):", "print(add(1, 2))")]
    for prompt in prompts:
        for temperature in (0.0, 1.0):
            settings = {"max_new_tokens": 12, "temperature": temperature}
            *_, (drafting, plain) = race(model, prompt, decode_of("all sources", **settings))
            steps = generate(model, prompt, DecodeConfig("plain", **settings))
            assert drafting.tokens == plain.tokens == [token for step in steps for token in step.tokens]
            assert plain.forwards == len(plain.tokens) >= drafting.forwards
            assert "identical" in verdict(drafting, plain)


def test_the_decoder_that_used_less_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 ms beside steps of 5 ms: the clock of each counts its own steps alone."""
    clock = [0.0]

    def steps(seconds: float, count: int) -> Iterator[TextStep]:
        for n in range(count):
            clock[0] += seconds
            yield TextStep(0, [n], 0, 0, n == count - 1, ["x"])

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    texts = iter([steps(0.001, 20), steps(0.005, 20)])
    monkeypatch.setattr(module, "generate", lambda *args: next(texts))
    frames = [(len(fast.tokens), len(slow.tokens)) for fast, slow in race(None, "x", DecodeConfig())]  # type: ignore[arg-type]
    assert all(slow <= 2 + fast // 5 for fast, slow in frames if fast < 20)
    fast, slow = Racer(steps(0.001, 3), "", ""), Racer(steps(0.005, 3), "", "")
    for runner in (fast, slow):
        while not runner.finished:
            runner.advance()
    assert fast.rate == pytest.approx(1000) and slow.rate == pytest.approx(200)
    assert verdict(fast, slow).startswith("5.00 times")


def test_markup_of_a_prompt_is_text(model: Model) -> None:
    *_, (drafting, _) = race(model, "<script>alert(1)</script>", DecodeConfig(max_new_tokens=4))
    assert "<script>" not in drafting.html and "&lt;script&gt;" in drafting.html


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_decoder_of_the_page_has_settings(decoder: str) -> None:
    decode = decode_of(decoder, k=3, max_new_tokens=5, temperature=0.5, top_p=0.9, seed=2)
    assert (decode.max_new_tokens, decode.temperature, decode.seed) == (5, 0.5, 2)
    assert decode.k == (None if decoder in ("plain", "n-grams only") else 3)


def test_what_cannot_be_decoded_is_said_before_the_first_step(model: Model) -> None:
    with pytest.raises(UserError):
        next(race(model, "x", DecodeConfig(max_new_tokens=10**6)))
