"""Adapters by anybody, beside a model's weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from conf import UserError
from infer.models.checkpoint import load_model
from tests.conftest import tiny_llama
from tests.infer.conftest import ROWS
from tests.infer.models.test_draft import copied


def adapted(model_dir: Path, folder: Path, *, gated: bool, **settings: Any) -> Path:
    """A copy of a model directory with an adapter of these settings of peft."""
    copied(model_dir, folder)
    described = json.loads((folder / "adaptive.json").read_text())
    (folder / "adaptive.json").write_text(json.dumps(described | {"gated": gated}))
    lora = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings})
    get_peft_model(tiny_llama(vocab=ROWS), lora).save_pretrained(folder / "adapter")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 1], [0, 2]]},
        {"init_lora_weights": "pissa"},
        {"use_dora": True},
        {"bias": "all"},
        {"target_modules": ["embed_tokens"]},
        {"alora_invocation_tokens": [5]},
    ],
)
def test_a_gated_adapter_that_a_gate_cannot_close_is_refused(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Some changed the base model's weights, so that plain decoding was another model's; of others the gated
    layers left a part out, or ended in a KeyError.
    """
    folder = adapted(model_dir, tmp_path / "model", gated=True, **settings)
    with pytest.raises(UserError, match="a gated adapter must be LoRA of linear layers, got"):
        load_model(folder, dtype="float32")


def test_an_adapter_that_cannot_be_merged_is_one_sentence(model_dir: Path, tmp_path: Path) -> None:
    """Peft's NotImplementedError came through."""
    folder = adapted(model_dir, tmp_path / "model", gated=False, alora_invocation_tokens=[5])
    with pytest.raises(UserError, match="must be a LoRA adapter of this model, got aLoRA"):
        load_model(folder, dtype="float32")
