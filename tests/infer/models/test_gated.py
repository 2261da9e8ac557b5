"""Test gated adapters of some projections: layers that read the same input stay one product."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from conf.devices.int8 import exact_kernel
from infer import DecodeConfig, load
from infer.engine import fused
from infer.engine.forward import Target
from infer.engine.packed import TYPES
from infer.engine.runner import Runner
from infer.models.gated import gate_model
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.conftest import ROWS
from tests.infer.gated import adapted_copy
from tests.infer.library import PROMPT, logits_of, tokens_of

TARGETS = [["q_proj", "v_proj"], ["v_proj", "up_proj"], ["o_proj", "down_proj"]]

pytestmark = pytest.mark.skipif(
    torch.float32 not in TYPES, reason="this PyTorch has no oneDNN"
)


def tree_logits(lm: PreTrainedModel) -> torch.Tensor:
    """Return the logits (nodes, V) of a tree with two probes."""
    runner = Runner(lm, capacity=16, max_rows=5)
    runner.prefill([PROMPT])
    return logits_of(runner, [Tree((7, 9), (-1, 0), 2).probe((1,), (90, 90))])[0]


@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapter_of_some_projections_uses_the_fused_decoder(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    targets: list[str],
) -> None:
    """Bug: LoRA of q_proj and v_proj alone made every forward slower, without a message."""
    folder = adapted_copy(model_dir, tmp_path / "model", target_modules=targets)
    lm = load(folder, "float32", "cpu").lm
    assert Target(lm, batch=1, capacity=8).fused is not None
    actual = tree_logits(lm)
    monkeypatch.setattr(fused, "DECODERS", {})
    torch.testing.assert_close(tree_logits(lm), actual)
    library = gate_model(tiny_llama(vocab=ROWS), folder / "adapter")
    library.load_state_dict(lm.state_dict())
    torch.testing.assert_close(tree_logits(library), actual, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(exact_kernel() is None, reason="int8 is not exact on this CPU")
@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapter_of_some_projections_is_exact_in_int8(
    model_dir: Path, tmp_path: Path, targets: list[str]
) -> None:
    folder = adapted_copy(model_dir, tmp_path / "model", target_modules=targets)
    model = load(folder, "int8", "cpu")
    assert Target(model.lm, batch=1, capacity=8).fused is not None
    plain, drafted = (
        tokens_of(model, [PROMPT], DecodeConfig(name, max_new_tokens=24))
        for name in ("plain", "sdsat")
    )
    assert plain == drafted
