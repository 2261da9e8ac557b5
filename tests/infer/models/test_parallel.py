"""Tensor parallel by two processes on this machine."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, MambaConfig

from conf import UserError
from infer.models.checkpoint import ModelDirectory
from infer.models.parallel import is_first, plan, processes
from tests import warm
from tests.conftest import tiny_llama
from tests.infer.gated import write_adapter
from tests.infer.models.parallel_worker import MEASURED, outputs


def test_two_ranks_emit_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, by both ways through the model, and where each rank has its own clock."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "costs"))
    lm = tiny_llama()
    lm.save_pretrained(tmp_path)
    torch.manual_seed(1)
    for parameter in lm.parameters():
        parameter.data += 0.1 * parameter.std() * torch.randn_like(parameter)
    lm.save_pretrained(tmp_path / "draft")
    words = Tokenizer(WordLevel({str(id): id for id in range(97)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    tiny_llama().save_pretrained(tmp_path / "gated")
    write_adapter(
        tiny_llama(), tmp_path / "gated" / "adapter", r=16, trainable_token_indices=[90]
    )
    (tmp_path / "gated" / "adaptive.json").write_text(
        json.dumps({"adaptive_ids": [90], "L": 3, "gated": True})
    )
    for folder in (tmp_path, tmp_path / "draft", tmp_path / "gated"):
        words.save(str(folder / "tokenizer.json"))
    answer = warm.run_ranks(outputs.__module__, tmp_path, ranks=2)
    assert answer.returncode == 0, answer.stderr
    line, text = answer.stdout.splitlines()  # one rank prints
    assert len(text.split()) == 4 and answer.stderr.count("tokens/s") == 1
    result = json.loads(line)
    refused = result.pop(
        "refused"
    )  # rank 1 alone ran out of memory, and rank 0 says so
    assert refused.startswith(f"out of memory for the weights of {tmp_path / 'draft'},")
    assert result == outputs(str(tmp_path))
    assert (
        result["sampled"] == result["fixed shapes"]
        and result["auto"] == result["greedy"]
    )
    assert any(result["gated"][1])
    for drafted in result["drafted"].values():
        plain = drafted["ssd"][0]
        assert drafted["gsd"][0] == plain
        assert drafted["gsd, measured"][0] == [text[:MEASURED] for text in plain]
        assert all(
            sum(accepted) for _, accepted in drafted.values() if accepted is not None
        )


def test_a_schedulers_world_is_not_torchruns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stray WORLD_SIZE=2 was taken for torchrun's, and the library was made to divide the model."""
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert (processes(), is_first()) == (1, True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (processes(), is_first()) == (2, False)
    (tmp_path / "config.json").touch()
    with pytest.raises(
        UserError,
        match="device must be unset under torchrun, .* 2 processes one, got cpu",
    ):
        ModelDirectory(tmp_path).load(dtype="float32", device="cpu")


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match="4 heads and 2 key-value heads, got 4"):
        plan(LlamaConfig(num_attention_heads=4, num_key_value_heads=2), 4)
    with pytest.raises(UserError, match="got mamba, which has no tensor parallel plan"):
        plan(MambaConfig(), 2)
