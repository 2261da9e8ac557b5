"""What tests of custom_generate share: this decoder behind the library's arguments, and what hears it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from infer.portable.custom_generate import generate

Generate = Callable[..., Any]
PROMPT = [20, 30, 40, 51]


def drafting(lm: PreTrainedModel, *ids: int, L: int = 3) -> Generate:
    return partial(generate, model=lm, adaptive_ids=ids, L=L)


def left_padded(prompts: list[list[int]], fill: int = 1) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    before = [longest - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[fill] * n + prompt for n, prompt in zip(before, prompts)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (longest - n) for n in before]),
    }


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


class Ends(StoppingCriteria):
    """A text ends with a token that is divisible by a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return input_ids[:, -1] % self._number == 0
