"""Who may draft: the same token ids piece by piece, and a model's first layers in its own memory."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from conf import UserError, settings
from infer import DecodeConfig, DraftConfig, generate, load
from infer.config import InferConfig
from infer.drafters.draft_model import UNREAD
from infer.engine.runner import Runner
from infer.methods import ROWS as ROWS_IN_A_STEP
from infer.models.draft import STAND_IN, Draft, rows_of_both
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.conftest import ROWS
from tests.infer.engine.test_families import tiny
from tests.infer.library import logits_of

PIECES = st.text("ab", min_size=1, max_size=2)
PROMPT = [5, 17, 3, 88, 41]


@given(
    st.dictionaries(st.integers(0, 12), PIECES),
    st.dictionaries(st.integers(0, 12), PIECES),
)
def test_ids_are_compared_piece_by_piece(
    target: dict[int, str], draft: dict[int, str]
) -> None:
    shared = [id for id in range(13) if id in target and id in draft]
    differing = [id for id in shared if target[id] != draft[id]]
    if differing:
        id = differing[0]
        with pytest.raises(
            ValueError, match=f"whose id {id} is '{target[id]}', got '{draft[id]}'"
        ):
            rows_of_both(target, draft)
    elif not shared:
        with pytest.raises(ValueError, match="got none of them"):
            rows_of_both(target, draft)
    else:
        rows = rows_of_both(target, draft)
        assert rows == max(shared) + 1 == rows_of_both(draft, target)


def copied(folder: Path, to: Path, *without: str) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns(*without))
    return to


def other_rows(folder: Path, rows: int, **settings: Any) -> None:
    """Another model in the directory: so many rows, and its tokenizer as it is."""
    torch.manual_seed(1)
    config = LlamaConfig(**(tiny_llama(vocab=rows).config.to_dict() | settings))
    LlamaForCausalLM(config).save_pretrained(folder)


def with_pieces(folder: Path, *pieces: str) -> None:
    """The directory's tokenizer with further pieces behind its own."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(piece, special=True) for piece in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_what_only_one_of_the_two_knows_is_neither_read_nor_proposed(
    base_dir: Path, tmp_path: Path
) -> None:
    """The target has two pieces more, the draft another one in their place and rows of padding behind it."""
    target, draft = (
        copied(base_dir, tmp_path / "target"),
        copied(base_dir, tmp_path / "draft"),
    )
    other_rows(target, ROWS + 2)
    with_pieces(target, "<adaptive>", "<other>")
    other_rows(draft, 480, tie_word_embeddings=True, max_position_embeddings=64)
    result = load(target, "float32", draft=draft).draft
    assert isinstance(result, Draft)
    assert (result.rows, result.context, result.adaptive) == (ROWS, 64, None)
    assert result.read([5, ROWS, ROWS - 1, ROWS + 1]) == [
        5,
        STAND_IN,
        ROWS - 1,
        STAND_IN,
    ]

    whole = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    runner = Runner(result.lm, capacity=16, max_rows=1)
    runner.prefill([PROMPT])
    (found_logits,) = logits_of(runner, [Tree.chain(7)])
    logits = whole(torch.tensor([[*PROMPT, 7]])).logits[0, -1]
    assert logits.shape == (480,)
    torch.testing.assert_close(found_logits[0], logits[:ROWS])
    table, head = (
        result.lm.get_input_embeddings().weight,
        result.lm.get_output_embeddings().weight,
    )
    assert table.shape[0] == 480 and head.data_ptr() == table.data_ptr()
    with_pieces(draft, "<mine>")
    with pytest.raises(
        UserError,
        match=rf"^draft={draft} must have .*, whose id 400 is '<adaptive>', got '<mine>'$",
    ):
        load(target, "float32", draft=draft)


def test_a_larger_draft_is_warned_of(
    model_dir: Path, base_dir: Path, tmp_path: Path, caplog
) -> None:
    same = load(model_dir, "bfloat16", draft=base_dir)
    assert not caplog.text and same.draft and same.draft.lm.dtype == torch.bfloat16
    draft = copied(base_dir, tmp_path / "draft")
    other_rows(draft, ROWS, num_hidden_layers=4)
    model = load(model_dir, "bfloat16", draft=DraftConfig(str(draft), dtype="float32"))
    (message,) = caplog.messages
    assert model.draft and (model.draft.lm.dtype, model.lm.dtype) == (
        torch.float32,
        torch.bfloat16,
    )
    sizes = f"{model.lm.num_parameters():,}, got {model.draft.lm.num_parameters():,}"
    assert message.startswith(
        f"draft={draft} must have fewer parameters than the model's {sizes}, "
    )


def test_a_directory_that_cannot_draft_is_reported_as_the_draft(
    model_dir: Path, base_dir: Path, tmp_path: Path
) -> None:
    """The same mistakes as a model's: "model=" would name the wrong one of the two."""
    draft = copied(base_dir, tmp_path / "draft")

    def refused(sentence: str, **more: Any) -> None:
        with pytest.raises(UserError) as message:
            load(model_dir, "float32", draft=DraftConfig(str(draft), **more))
        assert str(message.value).startswith(
            f"draft={draft} must {sentence}"
        ) and "\n" not in str(message.value)

    refused("be fine-tuned with adaptive tokens, got no adaptive.json", adaptive=True)
    (draft / "model.safetensors").unlink()
    refused("be a causal model with weights, got ")
    tiny("cohere", vocab_size=ROWS).save_pretrained(draft)
    refused("be a causal model whose attention follows a tree, got cohere")
    (draft / "tokenizer.json").unlink()
    refused(f"have a tokenizer at {draft}/tokenizer.json, got none")
    shutil.rmtree(draft)
    refused("be a Transformers model directory, got no such directory")


@pytest.mark.parametrize(
    ("adaptive", "chosen", "sentence"),
    [
        (False, {"k": 17}, "decode.k must be at most 16 children, got 17"),
        (
            True,
            {"theta_prob": 0.4},
            "decode.theta_prob must be left out with draft_adaptive=true, got 0.4",
        ),
        (
            True,
            {"verify": "ratio", "temperature": 1.0},
            "decode.verify must be left out with draft_adaptive=true, got ratio",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    model_dir: Path, adaptive: bool, chosen: dict[str, Any], sentence: str
) -> None:
    model = load(model_dir, "float32", draft=DraftConfig("self:1", adaptive=adaptive))
    with pytest.raises(UserError, match=sentence):
        generate(model, [5, 6, 7], DecodeConfig(method="gsd", **chosen))


def test_the_draft_models_rows_are_no_positions(model_dir: Path) -> None:
    """They were bounded by the target's 512 positions, of which siblings share one."""
    model = load(model_dir, "float32", draft="self:1")
    decode = DecodeConfig(max_new_tokens=8, nodes=16)
    assert any(step.drafted for step in generate(model, [5, 6], decode))
    assert (UNREAD + ROWS_IN_A_STEP).bit_count() == 1


@pytest.mark.parametrize("method", ["ssd", "gsd"])
def test_the_presets_suit_adaptive_tokens_too(model_dir: Path, method: str) -> None:
    """They gave settings of the levels, which a draft by adaptive tokens does not have."""
    model = load(model_dir, "float32", draft=DraftConfig("self:1", adaptive=True))
    given = ["model=m", "prompt=x", f"decode={method}", "decode.max_new_tokens=4"]
    assert list(
        generate(model, [5, 6, 7], settings("infer", InferConfig, given).decode)
    )
