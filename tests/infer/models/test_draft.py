"""Test draft models: models with the same token ids, and a model's first layers."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from conf.errors import UserError
from infer import load
from infer.engine.attention import ProbeGate
from infer.engine.families import check_tree
from infer.engine.forward import Target
from infer.engine.packed import pack
from infer.engine.runner import Runner
from infer.models.checkpoint import ModelDirectory
from infer.models.draft import STAND_IN, first_layers, shared_rows
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.conftest import ROWS
from tests.infer.engine.test_families import FAMILIES, tiny, tiny_family
from tests.infer.gated import adapted_copy
from tests.infer.library import PROMPT, logits_of

VOCABULARY = st.dictionaries(st.integers(0, 12), st.text("ab", min_size=1, max_size=2))


@given(VOCABULARY, VOCABULARY)
def test_ids_are_compared_piece_by_piece(
    target: dict[int, str], draft: dict[int, str]
) -> None:
    shared = sorted(target.keys() & draft.keys())
    if shared and all(target[id] == draft[id] for id in shared):
        assert shared_rows(target, draft, "draft") == max(shared) + 1
    else:
        with pytest.raises(UserError, match="draft must have the model's token ids"):
            shared_rows(target, draft, "draft")


def other_model(folder: Path, rows: int, **settings: Any) -> None:
    """Replace the directory's model by a model with `rows` rows; keep the tokenizer."""
    torch.manual_seed(1)
    config = LlamaConfig(**(tiny_llama(vocab=rows).config.to_dict() | settings))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def add_pieces(folder: Path, *pieces: str) -> None:
    """Add pieces to the end of the directory's tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(piece, special=True) for piece in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_ids_of_one_model_only_are_neither_read_nor_drafted(
    base_dir: Path, tmp_path: Path
) -> None:
    """The target has two more pieces; the draft model has rows without pieces."""
    target = shutil.copytree(base_dir, tmp_path / "target")
    draft = shutil.copytree(base_dir, tmp_path / "draft")
    other_model(target, ROWS + 2)
    add_pieces(target, "<adaptive>", "<other>")
    other_model(draft, 480, tie_word_embeddings=True, max_position_embeddings=64)
    result = load(target, "float32", draft=str(draft)).draft
    assert result and (result.rows, result.context) == (ROWS, 64)
    assert result.read([5, ROWS, ROWS - 1]) == [5, STAND_IN, ROWS - 1]
    whole = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    expected = whole(torch.tensor([[*PROMPT, 7]])).logits[0, -1]
    torch.testing.assert_close(tree_logits(result.lm)[0], expected[:ROWS])
    add_pieces(draft, "<mine>")
    reason = "got '<mine>' instead of '<adaptive>' for id 400"
    with pytest.raises(
        UserError, match=rf"^draft={draft} must have .*, {reason}\. Use"
    ):
        load(target, "float32", draft=str(draft))


@pytest.mark.parametrize(
    ("draft", "sentence"),
    [
        ("empty", "be a causal model with weights, got"),
        ("unsuited", "be a causal model .* follow a tree, got gemma2"),
        ("absent", "be a Transformers model directory, got no such"),
        ("self:2", "have fewer layers than the model's 2, got self:2"),
    ],
)
def test_what_cannot_draft_is_refused(
    base_dir: Path, tmp_path: Path, draft: str, sentence: str
) -> None:
    name = "draft"
    if not draft.startswith("self"):
        folder = tmp_path / draft
        if draft != "absent":
            shutil.copytree(base_dir, folder)
        if draft == "empty":
            (folder / "model.safetensors").unlink()
        if draft == "unsuited":
            tiny("gemma2", vocab_size=ROWS).save_pretrained(folder)
        draft = str(folder)
        name = f"draft={folder}"
    with pytest.raises(UserError, match=f"^{name} must {sentence}"):
        load(base_dir, "float32", draft=draft)


def tree_logits(lm: PreTrainedModel) -> torch.Tensor:
    """Return the logits (nodes, V) of a tree with a probe under its last node."""
    runner = Runner(lm, capacity=16, max_rows=4)
    runner.prefill([PROMPT])
    return logits_of(runner, [Tree((7, 9, 3), (-1, 0, 0), 3).probe((2,), (90,))])[0]


def addresses(lm: PreTrainedModel) -> set[int]:
    return {tensor.data_ptr() for tensor in (*lm.parameters(), *lm.buffers())}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layers_are_the_librarys_model_of_as_many_layers(family: str) -> None:
    lm = tiny_family(family)
    before = tree_logits(lm)
    config = copy.deepcopy(lm.config)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    config.num_hidden_layers = 1
    expected = AutoModelForCausalLM.from_config(config).eval()
    stored = lm.state_dict()
    expected.load_state_dict({name: stored[name] for name in expected.state_dict()})
    short = first_layers(lm, 1)
    assert torch.equal(tree_logits(short), tree_logits(expected))
    assert addresses(short) <= addresses(lm)
    check_tree(short)
    assert torch.equal(tree_logits(lm), before) and lm.config.num_hidden_layers == 2


def test_the_first_layers_share_the_packed_products() -> None:
    """Bug: on a CPU a model's own first layers drafted without the fused decoder."""
    lm = tiny_llama()
    pack(lm, 1 << 40)
    short = first_layers(lm, 1)
    fused = Target(short, batch=1, capacity=8).fused
    assert fused is not None and len(fused._layers) == 1
    with torch.inference_mode():
        head = short.get_output_embeddings()
        assert head is not lm.get_output_embeddings()
        assert torch.equal(
            tree_logits(short), tree_logits(first_layers(tiny_llama(), 1))
        )


def test_the_first_layers_of_a_gated_model_have_a_gate_of_their_own(
    model_dir: Path, tmp_path: Path
) -> None:
    """A shared gate would open the target's adapter with the draft's."""
    base = ModelDirectory(model_dir).load(dtype="float32", device="cpu")
    folder = adapted_copy(model_dir, tmp_path / "gated")
    lm = ModelDirectory(folder).load(dtype="float32", device="cpu")
    short = first_layers(lm, 1)
    assert addresses(short) <= addresses(lm)
    assert ProbeGate.of(short) is not ProbeGate.of(lm)
    result = tree_logits(short)
    expected = tree_logits(first_layers(base, 1))
    assert torch.equal(result[:3], expected[:3])
    assert not torch.equal(result[3], expected[3])
