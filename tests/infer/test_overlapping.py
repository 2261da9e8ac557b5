"""Test overlapping calls in threads on one model: every text equals a single call's text.

`transformers serve`, and servers that use `infer.generate`, run calls in threads.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from transformers import PreTrainedModel

from infer import DecodeConfig, Model, load
from tests.infer.gated import adapted_copy
from tests.infer.library import PROMPT, Generate, left_padded, tokens_of

THREADS = 4
PROMPTS = [PROMPT, [61, 62], [99] * 7, [20, 31, 77]]
Value = TypeVar("Value")


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Switch threads after every few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(calls: Sequence[Callable[[], Value]]) -> list[Value]:
    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_custom_generate_beside_the_librarys_padded_batches(
    lm: PreTrainedModel, ours: Generate
) -> None:
    """Regression: custom_generate set the model's attention while the library's batches ran."""
    requested = [
        left_padded(prompts) | {"max_new_tokens": 12, "do_sample": False}
        for prompts in (PROMPTS, PROMPTS[1:])
    ]
    ways: list[dict[str, Any]] = [{"probes": "root"}, {"probes": "all", "k": 2}, {}]
    calls = [partial(lm.generate, **item) for item in requested]
    expected = [call().tolist() for call in calls]
    for index, way in enumerate(ways * 2):
        calls.append(partial(ours, **requested[index % 2], **way))
        expected.append(expected[index % 2])
    before = lm.config.to_dict()
    result = in_threads(calls * 5)
    assert [item.tolist() for item in result] == expected * 5
    assert lm.config._attn_implementation == "sdpa" and lm.config.to_dict() == before


@pytest.mark.parametrize("gated", [False, True])
def test_generate_in_threads(
    model: Model, model_dir: Path, tmp_path: Path, gated: bool
) -> None:
    """Regression: an adapter's gate was opened for the rows of another thread's forward."""
    if gated:
        model = load(adapted_copy(model_dir, tmp_path / "gated"), "float32")
    methods: list[dict[str, Any]] = [
        {},
        {"probes": "root", "k": 3},
        {"probes": "all", "k": 2},
    ]
    expected: list[list[list[int]]] = []
    calls: list[Callable[[], list[list[int]]]] = []
    for prompt in PROMPTS:
        for temperature in (0.0, 1.0):
            plain = DecodeConfig("plain", max_new_tokens=16, temperature=temperature)
            text = tokens_of(model, [prompt], plain)
            for method in methods:
                decode = replace(plain, method=None, **method)
                calls.append(partial(tokens_of, model, [prompt], decode))
                expected.append(text)
    assert in_threads(calls) == expected
