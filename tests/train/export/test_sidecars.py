"""Test the export's files besides the weights, as read by Transformers, servers and decoding."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from conf.runs.files import read_json, write_json
from data_prep.vocab import TOKENIZER, copy_tokenizer
from infer.models.checkpoint import ModelDirectory
from tests.train.export.export_fixture import training
from tests.train.export.readers import tensorrt_mask_id, vllm_mask_id
from train.export.sidecars import (
    adaptive_json,
    served_config,
    served_generation,
    write_sidecars,
)
from train.model import write_architecture

LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
# Parts of config.json as published with these models, without keys that the export ignores.
SHAPES: dict[str, dict[str, Any]] = {
    "codellama-7b": {"rope_theta": 1000000, "rope_scaling": None},
    "llama-3.1": {"rope_theta": 500000.0, "rope_scaling": LLAMA_3},
    "stablelm": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
    },
}


def exported(
    tmp_path: Path,
    *,
    lora: dict[str, Any] | None = None,
    keep_adapter: bool = False,
    **facts: Any,
) -> Path:
    checkpoint, manifest = training(tmp_path / "tuned", **facts)
    manifest["settings"]["lora"] = lora or {"rank": 0}
    out = tmp_path / "model"
    out.mkdir()
    kept = {"keep_adapter": keep_adapter}
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.bfloat16, **kept)
    return out


def test_an_export_has_the_facts_of_its_training(tmp_path: Path) -> None:
    out = exported(tmp_path, adaptive=2)
    manifest = read_json(tmp_path / "tuned" / "manifest.json")
    vocab, ids = manifest["vocab"], manifest["adaptive"]
    config = AutoConfig.from_pretrained(out)
    assert config.vocab_size == vocab["size"] and config.dtype == torch.bfloat16
    assert config.architectures == ["LlamaForCausalLM"]
    generation = GenerationConfig.from_pretrained(out)
    assert generation.bos_token_id == vocab["bos"]
    assert generation.eos_token_id == vocab["eos"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    text_ids = tokenizer("def f(x):").input_ids
    assert text_ids == ModelDirectory(out).text.encode("def f(x):")
    assert tokenizer.decode([*text_ids, *ids], skip_special_tokens=True) == "def f(x):"
    loaded = ModelDirectory(out).need_adaptive()
    assert not loaded.has_head
    headed = manifest["settings"]["objective"] | {"previous_token": True}
    manifest["settings"]["objective"] = headed
    content = adaptive_json(tmp_path / "tuned", manifest, step=9)
    assert content and content["head"] is True
    assert list(loaded.ids) == ids
    assert (loaded.L, loaded.bos, loaded.gated) == (2, vocab["bos"], False)
    names = ("bos", "eos", "pre", "suf", "mid", "eot")
    assert loaded.control == {*vocab["adaptive"], *(vocab[n] for n in names)}
    assert "someone" not in (out / "adaptive.json").read_text()  # no path of a user


def test_named_chat_templates_are_copied(tmp_path: Path) -> None:
    """Bug: data preparation, training and export lost additional_chat_templates/."""
    tokenizer = AutoTokenizer.from_pretrained(training(tmp_path / "base")[0] / "model")
    tokenizer.chat_template = {"default": "D", "tool_use": "T"}
    tokenizer.save_pretrained(tmp_path / "source")
    data, checkpoint = tmp_path / "data", tmp_path / "tuned"
    copy_tokenizer(tmp_path / "source", data / TOKENIZER)
    _, manifest = training(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint / "model")
    shutil.rmtree(checkpoint / "model")
    lm = SimpleNamespace(config=config, generation_config=None)
    write_architecture(lm, data, checkpoint / "model")
    out = tmp_path / "model"
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.bfloat16)
    expected = {"default": "D", "tool_use": "T"}
    assert AutoTokenizer.from_pretrained(out).chat_template == expected


@pytest.mark.parametrize(
    ("adaptive", "gated", "kept"),
    [(0, False, False), (1, False, False), (2, False, False), (1, True, True)]
    + [(1, False, True)],
)
def test_config_json_has_a_mask_token_only_if_servers_can_draft_with_it(
    tmp_path: Path, adaptive: int, gated: bool, kept: bool
) -> None:
    """Servers use one mask token and no adapter, so diverse or gated ones would draft wrongly.

    Bug: a directory with lora=kept named its mask token, although the weights lack the trained row.
    """
    lora = {"rank": 4, "gated": gated} if kept else None
    out = exported(tmp_path, adaptive=adaptive, lora=lora, keep_adapter=kept)
    config = read_json(out / "config.json")
    if adaptive == 1 and not kept:
        mask_id = read_json(out / "adaptive.json")["adaptive_ids"][0]
        assert vllm_mask_id(config) == tensorrt_mask_id(config) == mask_id
    else:
        with pytest.raises(ValueError, match="must have a mask token"):
            vllm_mask_id(config)


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_4_and_5_read_the_base_models_rope_settings(
    name: str, tmp_path: Path
) -> None:
    """Bug: Transformers 4 does not read rope_parameters, so CodeLlama's rope_theta was 10,000."""
    file = tmp_path / "config.json"
    write_json(file, {"model_type": "llama", **SHAPES[name]})
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    base = AutoConfig.from_pretrained(tmp_path).to_dict()
    served = served_config(
        read_json(file), architecture="A", dtype="float16", mask_id=7
    )
    write_json(file, served)
    changed = {"architectures": ["A"], "dtype": "float16"}
    changed |= {"pard_token": 7, "ptd_token_id": 7}
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == {**base, **changed}
    assert served["rope_theta"] == SHAPES[name]["rope_theta"]
    assert served["torch_dtype"] == "float16"
    expected = SHAPES[name].get("rope_scaling") or {}
    assert expected.items() <= (served["rope_scaling"] or {}).items()
    assert bool(served["rope_scaling"]) == bool(expected)
    partial = SHAPES[name].get("partial_rotary_factor")
    assert served.get("partial_rotary_factor") == partial


def test_generation_ends_with_the_eos_of_training() -> None:
    """Some base models have no EOS in generation_config.json; generation would not stop."""
    assert served_generation({}, bos=1, eos=2) == {"bos_token_id": 1, "eos_token_id": 2}
    generation = {"eos_token_id": [5, 2], "temperature": 0.2, "bos_token_id": None}
    assert served_generation(generation, bos=1, eos=2) == {
        **generation,
        "bos_token_id": 1,
    }
