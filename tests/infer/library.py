"""Helpers for tests of decoding: steps and logits of the loop, the library's arguments."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import infer
from infer import DecodeConfig, Model
from infer.drafters.candidates import CandidateSource
from infer.drafters.drafting import SourceDrafters
from infer.drafters.planner import Planner
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafters, Limits, Step, decode
from infer.ngrams import Ngrams
from infer.portable.custom_generate import generate
from infer.requests import Prompt
from infer.trees.mask_tokens import MaskTokens
from infer.trees.tree import Tree

Generate = Callable[..., Any]
PROMPT = [20, 30, 40, 51]
# Dynamic shapes, and fixed ones as for graphs.
BOTH_SHAPES = pytest.mark.parametrize(
    "static", [False, True], ids=["dynamic", "static"]
)


def collect(
    decoded: Iterable[Sequence[Step]], sequences: int
) -> tuple[list[list[int]], list[Step]]:
    """Return the tokens of every sequence, and all steps."""
    steps = [step for forward in decoded for step in forward]
    return [
        [t for s in steps if s.sequence == b for t in s.tokens]
        for b in range(sequences)
    ], steps


def tokens_of(
    model: Model, prompts: Sequence[Prompt], decode: DecodeConfig, **options: Any
) -> list[list[int]]:
    """Return the tokens of every prompt by `infer.generate`."""
    steps = infer.generate(model, prompts, decode, **options)
    return collect([list(steps)], len(prompts))[0]


def steps_of(
    lm: PreTrainedModel,
    new: Callable[[], Drafters],
    requests: Sequence[Request],
    sampling: Sampling = GREEDY,
    *,
    tokens: int,
    **options: bool,
) -> list[list[Step]]:
    """Decode a batch until id 1; return its steps."""
    drafters = new()
    capacity = max(len(request.prompt) for request in requests) + tokens
    runner = Runner(
        lm,
        capacity=capacity,
        max_rows=drafters.max_rows,
        batch=len(requests),
        **options,
    )
    limits = Limits(tokens, eos=[1])
    return list(decode(runner, requests, drafters, limits, sampling))


def by_tokens(
    ids: Sequence[int] | MaskTokens,
    planner: Planner,
    ngrams: Ngrams | None = None,
    **options: Any,
) -> SourceDrafters:
    """Return drafters by adaptive tokens, by their ids or as MaskTokens, and n-grams."""
    mask = ids if isinstance(ids, MaskTokens) else MaskTokens(tuple(ids))
    source = CandidateSource(
        mask, planner.max_probes, width=planner.width, ngrams=ngrams
    )
    return SourceDrafters(source, planner, **options)


def logits_of(runner: Runner, trees: Sequence[Tree]) -> list[torch.Tensor]:
    """Return the logits (nodes, V) of each tree."""
    # Fixed shapes keep their logits for processors.
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.0)])
    request = Request([0], processors=processors)
    output = runner.forward(trees, [request] * len(trees), Sampling())
    q = output.flat.ids.shape[1]
    whole = output.logits.whole().unflatten(0, (-1, q))
    return [
        whole[b][[output.flat.row(b, tree, node) for node in range(len(tree.tokens))]]
        for b, tree in enumerate(trees)
    ]


def by_library(lm, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits (V,) after the last token, by the library's own attention."""
    return lm(torch.tensor([list(tokens)])).logits[0, -1].detach()


def number_words(rows: int) -> Tokenizer:
    """Return a tokenizer that encodes each number as the id of this number."""
    words = Tokenizer(WordLevel({str(id): id for id in range(rows)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return words


def drafting(lm: PreTrainedModel, *ids: int, L: int = 3) -> Generate:
    return partial(generate, model=lm, adaptive_ids=ids, L=L)


def left_padded(prompts: list[list[int]], fill: int = 1) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    before = [longest - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(
            [[fill] * n + prompt for n, prompt in zip(before, prompts)]
        ),
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
    """A stopping criterion: a text ends with a token that is divisible by a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return input_ids[:, -1] % self._number == 0
