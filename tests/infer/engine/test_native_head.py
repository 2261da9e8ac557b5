"""Test the previous-token head in int8 and bfloat16: its logits, and values that overflow."""

import copy
from typing import Any

import pytest
import torch

from conf.devices.int8 import Native, exact_kernel
from infer.engine.head import PreviousTokenHead
from infer.engine.native_head import NativeHead
from infer.engine.rounded import to_int8
from infer.models.draft import first_layers
from tests.infer.engine.test_families import tiny
from tests.infer.engine.test_rounded import round_model

KERNEL = exact_kernel()
pytestmark = pytest.mark.skipif(
    KERNEL is None or not issubclass(KERNEL, Native),
    reason="no exact int8 products, or no C compiler",
)
IDS = [3, 9, 4, 11, 30, 5]


def heads(
    bias: bool = False, dtype: str = "int8"
) -> tuple[PreviousTokenHead, PreviousTokenHead]:
    """Return a random head, and the head of the same model in `dtype`."""
    lm: Any = tiny("llama")
    if bias:
        lm.lm_head.bias = torch.nn.Parameter(torch.randn(lm.config.vocab_size))
    d = lm.config.hidden_size
    lm.previous_token_head = PreviousTokenHead(
        lm, torch.randn(d, 2 * d), torch.randn(d, d)
    )
    exact = PreviousTokenHead.of(copy.deepcopy(lm))
    round_model(lm, dtype)
    head = PreviousTokenHead.of(lm)
    assert exact is not None and head is not None
    return exact, head


def test_a_model_with_this_head_drafts_by_its_first_layers() -> None:
    """Bug: draft=self:N ended in a traceback: the head's pointers cannot be copied."""
    lm: Any = tiny("llama")
    d = lm.config.hidden_size
    lm.previous_token_head = PreviousTokenHead(
        lm, torch.randn(d, 2 * d), torch.randn(d, d)
    )
    to_int8(lm)
    assert isinstance(PreviousTokenHead.of(lm), NativeHead)
    assert len(first_layers(lm, 1).get_decoder().layers) == 1


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_nearly_those_of_the_float32_head(bias: bool, dtype: str) -> None:
    exact, head = heads(bias, dtype)
    assert isinstance(head, NativeHead)
    hidden = torch.randn(3, head.width)
    ours, theirs = head.correct(hidden), exact.correct(hidden)
    pairs = [(ours(*key, IDS), theirs(*key, IDS)) for key in ((0, 7), (2, 1), (1, 30))]
    results, expected = map(torch.tensor, zip(*pairs))
    assert (results - expected).norm() < 0.03 * expected.norm()
    first, *_ = pairs
    assert ours(0, 7, IDS) == first[0]  # whatever was corrected before


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_hidden_state_that_overflows_gives_no_finite_logit(value: float) -> None:
    """candidates.py then takes the answers without correction."""
    _, head = heads()
    hidden = torch.randn(2, head.width)
    hidden[1, 3] = value
    correct = head.correct(hidden)
    assert torch.tensor(correct(0, 7, IDS)).isfinite().all()
    assert not torch.tensor(correct(1, 7, IDS)).isfinite().any()


def test_other_widths_keep_the_float32_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.native_head.LANES", 5)
    exact, head = heads()
    assert type(head) is type(exact)
