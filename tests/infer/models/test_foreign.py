"""Model directories that other programs made: no adaptive.json, pickled weights, a slow tokenizer alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import OPTConfig, OPTForCausalLM

from conf import UserError, settings
from infer import DecodeConfig, Infill, generate, load
from infer.config import AdaptiveConfig, InferConfig
from infer.models.checkpoint import ModelDirectory
from tests.infer.conftest import ROWS

PROMPT = "def f(x):"


def test_a_directory_without_adaptive_json_drafts_by_the_ids_that_are_given(
    model_dir: Path, base_dir: Path
) -> None:
    """The authors' published weights have no adaptive.json: they could be decoded plainly alone."""
    given = settings(
        "infer",
        InferConfig,
        [f"model={base_dir}", f"adaptive.ids=[{ROWS - 1}]", "adaptive.L=3"],
    )
    adaptive = AdaptiveConfig([ROWS - 1], 3)
    assert (given.model, given.adaptive) == (str(base_dir), adaptive)
    ids = ModelDirectory(model_dir).need_adaptive().ids
    described = load(model_dir, "float32")
    told = load(base_dir, "float32", adaptive_ids=ids, L=3)
    assert told.adaptive and described.adaptive
    assert (told.adaptive.ids, told.adaptive.L) == (ids, 3)
    assert told.adaptive.infilling == described.adaptive.infilling is not None
    for prompt in (PROMPT, Infill(PROMPT, "\n")):
        texts = [
            [
                token
                for step in generate(model, prompt, DecodeConfig("hybrid", k=3))
                for token in step.tokens
            ]
            for model in (described, told)
        ]
        assert texts[0] == texts[1]


def test_given_ids_must_fit_the_directory(model_dir: Path, base_dir: Path) -> None:
    with pytest.raises(
        UserError,
        match="adaptive.ids must be unset for a directory that has adaptive",
    ):
        load(model_dir, "float32", adaptive_ids=[ROWS - 1], L=3)
    with pytest.raises(
        UserError,
        match=f"adaptive_ids must be among the model's {ROWS} rows, got {ROWS}",
    ):
        load(base_dir, "float32", adaptive_ids=[ROWS], L=3)
    for given in ("adaptive.ids=[7]", "adaptive.L=5"):
        with pytest.raises(UserError, match="must be given together, got"):
            settings("infer", InferConfig, [f"model={base_dir}", given])


@pytest.fixture
def opt(tmp_path: Path) -> Path:
    """A directory like OPT's on the hub: pickled weights, and the files of GPT-2's slow tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([PROMPT], trainer)
    tokenizer.model.save(str(tmp_path))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "add_prefix_space": False,
    }
    config |= {
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
    }
    shape |= {"num_attention_heads": 2, "max_position_embeddings": 128}
    lm = OPTForCausalLM(OPTConfig(vocab_size=tokenizer.get_vocab_size(), **shape))
    lm.config.save_pretrained(tmp_path)
    torch.save(lm.state_dict(), tmp_path / "pytorch_model.bin")
    return tmp_path


def test_pickled_weights_and_a_slow_tokenizer_load(opt: Path) -> None:
    """OPT was refused for want of a tokenizer.json, without a word on how to get one."""
    model = load(opt, "float32")
    assert model.text.encode(PROMPT)[0] == 2  # </s> opens OPT's texts
    assert list(generate(model, PROMPT, DecodeConfig("plain", max_new_tokens=4)))


def test_a_tokenizer_that_the_library_cannot_convert_is_a_sentence(
    opt: Path, base_dir: Path
) -> None:
    (opt / "merges.txt").unlink()
    (opt / "vocab.json").write_text("no JSON")
    with pytest.raises(
        UserError, match=r"not converted .*AutoTokenizer.from_pretrained\(DIR\)"
    ):
        load(opt, "float32")
    shutil.copyfile(base_dir / "tokenizer.json", opt / "tokenizer.json")
    (opt / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(UserError, match="must be a causal model with weights, got"):
        load(opt, "float32")
