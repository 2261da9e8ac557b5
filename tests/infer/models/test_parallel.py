"""Test tensor parallelism with two processes on this machine."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MambaConfig

from conf.console import torchrun_rank
from conf.errors import UserError
from conf.runs.files import write_json
from infer.models.checkpoint import ModelDirectory
from infer.models.parallel import plan, processes
from tests import warm
from tests.conftest import tiny_llama
from tests.infer.gated import write_adapter
from tests.infer.library import number_words
from tests.infer.models.parallel_worker import outputs


def write_models(folder: Path) -> None:
    """Write a gated model, and a draft model close to it."""
    lm = tiny_llama()
    lm.save_pretrained(folder)
    torch.manual_seed(1)
    for parameter in lm.parameters():
        parameter.data += 0.1 * parameter.std() * torch.randn_like(parameter)
    lm.save_pretrained(folder / "draft")
    write_adapter(tiny_llama(), folder / "adapter", r=16, trainable_token_indices=[90])
    adaptive = {"adaptive_ids": [90], "L": 3, "gated": True}
    write_json(folder / "adaptive.json", adaptive)
    for path in (folder, folder / "draft"):
        number_words(97).save(str(path / "tokenizer.json"))


def test_two_ranks_emit_the_tokens_of_one(tmp_path: Path) -> None:
    """This holds although every rank has its own clock and only rank 0 has a good draft model."""
    write_models(tmp_path)
    answer = warm.run_ranks(outputs.__module__, tmp_path, ranks=2)
    assert answer.returncode == 0, answer.stderr
    line, text = answer.stdout.splitlines()  # one rank prints
    assert len(text.split()) == 4 and answer.stderr.count("tokens/s") == 1
    result = json.loads(line)
    assert result == outputs(str(tmp_path))
    for name, (texts, accepted) in result.items():
        assert "sampled" in name or texts == result["plain, None"][0]
        assert accepted is None or any(accepted)


def test_a_schedulers_world_is_not_torchruns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: WORLD_SIZE=2 of a scheduler was taken for torchrun's."""
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert (processes(), torchrun_rank()[0]) == (1, 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (processes(), torchrun_rank()[0]) == (2, 1)
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match="device must be unset under .* got cpu"):
        ModelDirectory(tmp_path).load(dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            LlamaConfig(num_attention_heads=4, num_key_value_heads=2),
            "4 heads and 2 key",
        ),
        (MambaConfig(), "mamba has no tensor-parallel plan"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(config, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        plan(config, 4)
