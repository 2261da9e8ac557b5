"""A model whose logits and whose times are chosen, and what the harness must say of it.

It counts up; its probes are right at the first m places and wrong behind them, m drawn anew for every draft.
A forward of q rows takes c(q) seconds, a prompt `prompt` seconds. With a_j the chance of draft j where all
before it are right, A_j = a_1 ... a_j and S = A_1 + ... + A_k, the paper's two forwards with k drafts (SDSAT
eq. 1-3) take turns: one of 1 + k rows that emits a token and drafts, one of 1 + k rows that verifies and emits
the accepted drafts and one more. So

    accepted at position j of drafts that reach it   A_j
    acceptance rate                                  S / k
    tokens per forward                               (2 + S) / 2
    rows per forward                                 1 + k
    seconds of a loop                                c(1 + k)
    speedup                                          c(1) (2 + S) / (2 c(1 + k))
    first token                                      prompt + c(1 + k)

up to the text's last draft, which is cut.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, count
from operator import mul
from time import perf_counter

import torch
from torch import nn

from infer.benchmarks.prompts import TokenPrompt
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.output import ForwardOutput, LazyOutput, Request
from infer.engine.pick import Logits
from infer.engine.runner import Clock
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits
from infer.measure.runs import Decoder, loop_decoder
from infer.speed import PLAIN, DecoderSpec
from infer.trees.tree import Tree, flatten

CHANCES = (0.9, 0.8, 0.7, 0.85, 0.5, 0.6, 0.4)  # a_1, a_2, ...
RIGHT = tuple(accumulate(CHANCES, mul))  # A_1, A_2, ...
TOKENS, WRONG, PROBE, VOCABULARY = 300, 310, 320, 321


class PacedRunner:
    """Spends, by `wait`, what a forward of so many rows takes."""

    clock = staticmethod(perf_counter)

    def __init__(self, wait: Callable[[float], None], seconds: Callable[[int], float], prompt: float) -> None:
        self._wait, self._seconds, self._prompt = wait, seconds, prompt
        self._lengths = [0]
        self._fates = fates()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        self._wait(self._prompt)
        self._lengths = [len(prompt) for prompt in prompts]

    def forward(self, trees: Sequence[Tree], requests: Sequence[Request], sampling: Sampling) -> ForwardOutput:
        (tree,) = trees
        right = next(self._fates) if tree.probed else 0
        logits = torch.zeros(len(tree.tokens), VOCABULARY)
        for node, token in enumerate(tree.tokens):
            following = (token + 1) % TOKENS
            if node >= tree.probes_from:
                place = node - tree.probes_from + 1
                following = (tree.tokens[0] + 1 + place) % TOKENS if place <= right else WRONG
            logits[node, following] = 1.0
        self._wait(self._seconds(len(tree.tokens)))
        head = Logits(nn.Identity(), logits, logits)
        return LazyOutput(head, flatten(trees, self._lengths), trees, requests, sampling)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._lengths = [length + len(path) for length, path in zip(self._lengths, paths)]

    def drop(self, b: int) -> None:
        self._lengths.pop(b)

    def agreed(self, seconds: float) -> float:
        return seconds


def fates() -> Iterator[int]:
    """How many places of a draft are right: m or more in a share A_m of all, spread evenly (the multiples of
    the golden ratio), so that a few hundred drafts are as good as very many drawn at random.
    """
    for number in count(1):
        u = number * 0.6180339887498949 % 1
        yield sum(u < chance for chance in RIGHT)


def decoders(
    ks: Sequence[int],
    new_tokens: int,
    *,
    wait: Callable[[float], None],
    seconds: Callable[[int], float],
    prompt: float,
    clock: Clock,
) -> dict[DecoderSpec, Decoder]:
    """Plain decoding and the paper's two forwards."""
    drafters = {PLAIN: Drafters(Drafter)}
    for k in ks:
        drafters[DecoderSpec("sdsat", k)] = Drafters(partial(AdaptiveDrafter, (PROBE,), FixedPolicy(k)))
    return {
        way: loop_decoder(
            PacedRunner(wait, seconds, prompt),  # type: ignore[arg-type]
            item,
            Limits(new_tokens),
            clock=clock,
            stamp=clock,
        )
        for way, item in drafters.items()
    }


def prompts(number: int) -> list[TokenPrompt]:
    return [TokenPrompt(f"fake/{index}", (index, index + 1), frozenset(), "", "") for index in range(number)]


def expected(k: int, seconds: Callable[[int], float], prompt: float) -> dict[str, float | list[float]]:
    """The closed forms, under the names of speed.json."""
    drafted = sum(RIGHT[:k])
    return {
        "acceptance_by_position": list(RIGHT[:k]),
        "acceptance_rate": drafted / k,
        "mean_acceptance_length": 1 + drafted,
        "node_efficiency": drafted / k,
        "tokens_per_forward": (2 + drafted) / 2,
        "rows_per_forward": 1 + k,
        "ms_per_forward": 1e3 * seconds(1 + k),
        "speedup": seconds(1) * (2 + drafted) / (2 * seconds(1 + k)),
        "tokens_per_second": (2 + drafted) / (2 * seconds(1 + k)),
        "first_ms": 1e3 * (prompt + seconds(1 + k)),
    }
