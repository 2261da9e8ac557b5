"""How callers behave: what they hear, and how they fail in the middle of a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from infer import TextStep


class Stopped(Exception):
    """A caller's own."""


@dataclass
class Told:
    """What came of a prompt: tokens and text, as far as the caller listened."""

    tokens: list[int]
    text: str = ""
    whole: bool = False

    def begins(self, wanted: "Told") -> bool:
        """Whether this is the wanted text, or its beginning where the caller went away."""
        if self.whole:
            return (self.tokens, self.text) == (wanted.tokens, wanted.text)
        return wanted.tokens[: len(self.tokens)] == self.tokens and wanted.text.startswith(self.text)


def told(steps: Iterator[TextStep], prompts: int, after: int | None = None) -> list[Told]:
    """What the steps say, all of them or so many."""
    found = [Told([]) for _ in range(prompts)]
    for number, step in enumerate(steps, 1):
        add(found, step)
        if number == after:
            break
    return found


def add(found: list[Told], step: TextStep) -> None:
    """A step of one of the prompts."""
    one = found[step.sequence]
    assert not one.whole and len(step.texts) == len(step.tokens) > 0
    one.tokens += step.tokens
    one.text += step.text
    one.whole = step.finished


class Countdown:
    """Fails when it is asked for the n-th time."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left <= 0:
            raise Stopped


class FailingProcessor(LogitsProcessor):
    """Changes no score, and fails at the n-th."""

    def __init__(self, n: int) -> None:
        self._count = Countdown(n)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._count()
        return scores


class FailingCriterion(StoppingCriteria):
    """Ends no text, and fails at the n-th token."""

    def __init__(self, n: int) -> None:
        self._count = Countdown(n)

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        self._count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Enough(StoppingCriteria):
    """A text ends after so many new tokens."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self._length)


class Listener(BaseStreamer):
    """Hears tokens, and fails at the n-th where n is given."""

    def __init__(self, n: int | None = None) -> None:
        self.heard: list[list[int]] = []
        self._n = n

    def put(self, value: Tensor) -> None:
        self.heard.append(value.flatten().tolist())
        if len(self.heard) == self._n:
            raise Stopped

    def end(self) -> None:
        self.heard.append([])
