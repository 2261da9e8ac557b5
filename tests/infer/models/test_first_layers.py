"""The model's own first layers as its draft: other modules, the same tensors."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conf import UserError
from infer import DraftConfig, Model, load
from infer.engine.attention import ProbeGate
from infer.engine.families import check_tree
from infer.engine.gate import GatedLinear
from infer.engine.runner import Runner
from infer.models.checkpoint import ModelDirectory
from infer.models.draft import first_layers
from infer.trees.tree import Tree
from tests.infer.conftest import ROWS
from tests.infer.engine.test_families import FAMILIES, tiny
from tests.infer.gated import adapted_copy
from tests.infer.library import PROMPT, logits_of


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layers_are_a_model_of_as_many_layers(family: str) -> None:
    """The reference is the library's own model, made with so many layers and given those weights."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings)
    before = said(lm)
    config = copy.deepcopy(lm.config)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    config.num_hidden_layers = 1
    expected = AutoModelForCausalLM.from_config(config).eval()
    stored = lm.state_dict()
    expected.load_state_dict({name: stored[name] for name in expected.state_dict()})
    short = first_layers(lm, 1)
    assert torch.equal(said(short), said(expected))
    assert addresses(short) <= addresses(lm)
    assert short.num_parameters() == expected.num_parameters()
    check_tree(short)
    assert torch.equal(said(lm), before) and lm.config.num_hidden_layers == 2


def said(lm: PreTrainedModel) -> torch.Tensor:
    """(nodes, V) of a tree, a probe under its last node."""
    runner = Runner(lm, capacity=16, max_rows=4)
    runner.prefill([PROMPT])
    return logits_of(runner, [Tree((7, 9, 3), (-1, 0, 0), 3).probe((2,), (90,))])[0]


def addresses(lm: PreTrainedModel) -> set[int]:
    """Of all weights and buffers, those that no checkpoint has too."""
    return {tensor.data_ptr() for tensor in (*lm.parameters(), *lm.buffers())}


def test_the_model_itself_drafts(model: Model, model_dir: Path) -> None:
    result = load(model_dir, "float32", draft="self:1")
    assert result.draft and result.draft.lm.config.num_hidden_layers == 1
    assert (result.draft.rows, result.draft.context, result.draft.adaptive) == (
        ROWS,
        result.context,
        None,
    )
    assert addresses(result.draft.lm) <= addresses(result.lm)
    probing = load(model_dir, "float32", draft=DraftConfig("self:1", adaptive=True))
    assert probing.draft and probing.draft.adaptive == model.adaptive


def test_as_many_layers_as_the_model_has_are_no_draft(
    model_dir: Path, base_dir: Path
) -> None:
    for layers in (2, 80):
        with pytest.raises(
            UserError, match=f"draft must have fewer layers .* 2, got self:{layers}"
        ):
            load(model_dir, "float32", draft=f"self:{layers}")
    with pytest.raises(UserError, match="draft must be self:N .* got self:half"):
        load(model_dir, "float32", draft="self:half")
    with pytest.raises(
        UserError, match=r"draft\.adaptive=true needs a model .* got no adaptive.json"
    ):
        load(base_dir, "float32", draft=DraftConfig("self:1", adaptive=True))


def test_the_first_layers_of_a_gated_model_have_a_gate_of_their_own(
    model_dir: Path, tmp_path: Path
) -> None:
    """One gate for both would open the target's adapter with the draft's. On probes alone it acts here too."""
    base = said(
        first_layers(ModelDirectory(model_dir).load(dtype="float32", device="cpu"), 1)
    )
    lm = ModelDirectory(adapted_copy(model_dir, tmp_path / "gated")).load(
        dtype="float32", device="cpu"
    )
    short = first_layers(lm, 1)
    assert addresses(short) <= addresses(lm)
    assert len({m.gate for m in short.modules() if isinstance(m, GatedLinear)}) == 1
    assert ProbeGate.of(short) is not ProbeGate.of(lm)
    result = said(short)
    assert torch.equal(result[:3], base[:3]) and not torch.equal(result[3], base[3])
