"""Two decoders on one prompt, at the pace that each has by itself. Knows no page.

Both would disturb each other if they ran at once. So their steps alternate in one thread: the next step is that
of the decoder that has used less time so far, and only a decoder's own steps count for it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from infer.api import Model, TextStep, generate
from infer.config import DecodeConfig
from infer.requests import Infill
from infer.view import legend, marked, span


@dataclass
class Racer:
    """One decoder's text as it comes, as HTML, with its counts and its own seconds."""

    steps: Iterator[TextStep]
    before: str
    after: str
    tokens: list[int] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    body: list[str] = field(default_factory=list)
    forwards: int = 0
    seconds: float = 0.0
    finished: bool = False

    def advance(self) -> None:
        """Take one step."""
        began = time.perf_counter()
        step = next(self.steps, None)
        self.seconds += time.perf_counter() - began
        if step is None:
            self.finished = True
            return
        self.tokens += step.tokens
        self.kinds.update(step.kinds)
        self.body.append(marked(step))
        self.forwards += 1
        self.finished = step.finished

    @property
    def html(self) -> str:
        """The text with what was given, and its legend."""
        after = span("given", self.after) if self.finished else ""
        return f"<pre>{span('given', self.before)}{''.join(self.body)}{after}</pre>{legend(self.kinds)}"

    @property
    def rate(self) -> float:
        """Tokens per second of its own steps."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def figures(self) -> str:
        """One line."""
        if not self.forwards:
            return ""
        per_forward = len(self.tokens) / self.forwards
        return f"{len(self.tokens)} tokens, {self.rate:.0f} tokens/s, {per_forward:.2f} tokens per forward"


def race(model: Model, prompt: str | Infill, decode: DecodeConfig) -> Iterator[tuple[Racer, Racer]]:
    """Yield `decode`'s text and plain decoding's of the same prompt and seed after each step.

    Raises UserError before the first step for what cannot be decoded.
    """
    before, after = (prompt.prefix, prompt.suffix) if isinstance(prompt, Infill) else (prompt, "")
    plain = DecodeConfig(
        "plain",
        max_new_tokens=decode.max_new_tokens,
        temperature=decode.temperature,
        top_p=decode.top_p,
        seed=decode.seed,
    )
    racers = [Racer(generate(model, prompt, settings), before, after) for settings in (decode, plain)]
    while running := [runner for runner in racers if not runner.finished]:
        min(running, key=lambda runner: runner.seconds).advance()
        yield racers[0], racers[1]


def verdict(drafting: Racer, plain: Racer) -> str:
    """Return the result of a finished race in a sentence."""
    same = "The texts are identical" if drafting.tokens == plain.tokens else "The texts differ (near-ties)"
    return f"{drafting.rate / plain.rate:.2f} times plain decoding's speed. {same}."


def decode_of(decoder: str, *, k: int = 0, **settings: Any) -> DecodeConfig:
    """Return a decoder of the page with further settings, and `k` drafts where it has adaptive tokens.

    Raises ValueError for settings that cannot be.
    """
    chosen = DECODERS[decoder]
    if k and chosen.method not in ("plain", "ngrams"):
        settings["k"] = k
    return replace(chosen, **settings)


DECODERS = {
    "all sources": DecodeConfig(),
    "adaptive tokens only": DecodeConfig("sdsat", sources=["adaptive"]),
    "n-grams only": DecodeConfig("ngrams"),
    "two forwards (the paper)": DecodeConfig("sdsat", sources=["adaptive"], probes="root"),
    "draft model (GSD)": DecodeConfig("gsd"),
    "plain": DecodeConfig("plain"),
}
