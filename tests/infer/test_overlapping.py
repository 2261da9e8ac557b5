"""Calls that overlap in threads on one model: every text is that of the call by itself.

`transformers serve`, and whoever serves by `infer.generate`, runs calls in threads.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from infer import DecodeConfig, Model, generate, load
from infer.drafters import policy as policies
from infer.drafters.adaptive import AdaptiveDrafter
from infer.drafters.policy import MeasuredPolicy, Policies
from infer.drafters.stopwatch import Stopwatch
from infer.engine.families import check_tree
from infer.engine.output import Candidates
from infer.engine.sampling import Sampling
from infer.loop import Verified
from infer.portable.custom_generate import state_of
from tests.infer.engine.test_families import tiny
from tests.infer.gated import adapted_copy
from tests.infer.library import PROMPT, Generate, left_padded

THREADS = 4
PROMPTS = [PROMPT, [61, 62], [99] * 7, [20, 31, 77]]
Value = TypeVar("Value")


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns within every few operations."""
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
    """custom_generate set the model's attention while it ran, and the library's batches came out wrong."""
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


def text_of(model: Model, prompt: list[int], decode: DecodeConfig) -> list[int]:
    return [token for step in generate(model, prompt, decode) for token in step.tokens]


@pytest.mark.parametrize("gated", [False, True])
def test_generate_in_threads(
    model: Model, model_dir: Path, tmp_path: Path, gated: bool
) -> None:
    """An adapter's gate belonged to the model: it was opened for the rows of another thread's forward."""
    if gated:
        model = load(adapted_copy(model_dir, tmp_path / "gated"), "float32")
    methods = [
        {"method": "plain"},
        {},
        {"probes": "root", "k": 3},
        {"probes": "all", "k": 2},
    ]
    expected, calls = list[list[int]](), list[Callable[[], list[int]]]()
    for prompt in PROMPTS:
        for temperature in (0.0, 1.0):
            text = text_of(
                model,
                prompt,
                DecodeConfig("plain", max_new_tokens=16, temperature=temperature),
            )
            for method in methods:
                decode = DecodeConfig(
                    **method, max_new_tokens=16, temperature=temperature
                )
                calls.append(partial(text_of, model, prompt, decode))
                expected.append(text)
    assert in_threads(calls) == expected


def test_a_plan_made_between_drafts_and_probes_adds_no_rows() -> None:
    """Another thread's text made the policy plan anew, and the tree was larger than the cache has room for."""
    policy = MeasuredPolicy([1.0] * len(policies.ROWS), 16)
    stopwatch = Stopwatch(tiny("llama"))

    def rows() -> list[int]:
        drafter, sizes = AdaptiveDrafter([90], policy, stopwatch=stopwatch), list[int]()
        for _ in range(100):
            tree = drafter.propose([1], 99)
            sizes.append(len(tree.tokens))
            answers = Candidates([[5, 6]] * 16, [[0.9, 0.1]] * 16)
            drafter.observe(Verified(tree, [0], 19, answers, sizes[-1]))
        return sizes

    sizes = [size for sizes in in_threads([rows] * THREADS) for size in sizes]
    assert 16 < max(sizes) <= policy.max_rows


def test_texts_that_begin_together_share_one_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prior = policies.prior_costs
    slow = Mock(side_effect=lambda device: time.sleep(0.05) or prior(device))
    monkeypatch.setattr(policies, "prior_costs", slow)
    kept = Policies()
    together = Barrier(THREADS)

    def begin() -> MeasuredPolicy:
        together.wait()
        return kept.find(
            "cpu", 3, frozenset(), batch=1, capacity=100, sampling=Sampling()
        )

    assert len(set(map(id, in_threads([begin] * THREADS)))) == slow.call_count == 1


def test_first_calls_that_overlap_keep_one_state_of_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each made its own, and what all but the last had measured and learned was lost."""
    lm, together = tiny("llama"), Barrier(THREADS)
    slow = Mock(side_effect=lambda lm: time.sleep(0.05) or check_tree(lm))
    monkeypatch.setattr("infer.portable.custom_generate.check_tree", slow)

    def first() -> int:
        together.wait()
        return id(state_of(lm))

    assert len(set(in_threads([first] * THREADS))) == slow.call_count == 1


def test_the_librarys_verbosity_survives_overlapping_loads(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two loads took the first one's silence for the user's, and restored that."""
    before = logging.get_verbosity()
    expected = torch.cat(
        [item.flatten() for item in load(model_dir, "float32").lm.parameters()]
    )
    models = in_threads([partial(load, model_dir, "float32")] * THREADS)
    assert logging.get_verbosity() == before
    assert all(
        torch.equal(torch.cat([item.flatten() for item in m.lm.parameters()]), expected)
        for m in models
    )
