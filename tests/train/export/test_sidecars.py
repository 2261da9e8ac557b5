"""The files beside the weights, read back by Transformers, servers and decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from infer.models.checkpoint import ModelDirectory
from tests.train.export.export_fixture import training
from tests.train.export.readers import tensorrt_mask_id, vllm_mask_id
from train.export.sidecars import served_config, served_generation, write_sidecars

LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
# config.json as their authors published it, without keys that the export ignores.
SHAPES: dict[str, dict[str, Any]] = {
    "codellama-7b": {
        "model_type": "llama",
        "max_position_embeddings": 16384,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "vocab_size": 32016,
    },
    "deepseek-coder": {
        "model_type": "llama",
        "rope_theta": 100000,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "bos_token_id": 32013,
        "eos_token_id": 32014,
    },
    "llama-3.1": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA_3,
        "eos_token_id": [128001, 128008, 128009],
    },
    "stablelm": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
    },
}


def exported(
    tmp_path: Path, *, lora: dict[str, Any] | None = None, **facts: Any
) -> Path:
    checkpoint, manifest = training(tmp_path / "tuned", **facts)
    manifest["settings"]["lora"] = lora or {"rank": 0}
    out = tmp_path / "model"
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.bfloat16)
    return out


@pytest.mark.parametrize("adaptive", [0, 1, 2])
def test_an_export_says_what_training_knew(adaptive: int, tmp_path: Path) -> None:
    out = exported(tmp_path, adaptive=adaptive)
    manifest = json.loads((tmp_path / "tuned" / "manifest.json").read_text())
    vocab = manifest["vocab"]
    ids = manifest["adaptive"]
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
    assert (out / "adaptive.json").exists() == bool(adaptive)
    if adaptive:
        loaded = ModelDirectory(out).need_adaptive()
        assert list(loaded.ids) == ids
        assert (loaded.L, loaded.bos, loaded.gated) == (2, vocab["bos"], False)
        names = ("bos", "eos", "pre", "suf", "mid", "eot")
        assert loaded.control == {*vocab["adaptive"], *(vocab[n] for n in names)}


@pytest.mark.parametrize(
    ("adaptive", "gated"), [(0, False), (1, False), (2, False), (1, True)]
)
def test_servers_find_the_mask_token_that_they_can_draft_with(
    tmp_path: Path, adaptive: int, gated: bool
) -> None:
    """With diverse tokens or without the adapter every draft would be wrong."""
    lora = {"rank": 4, "gated": True} if gated else None
    out = exported(tmp_path, adaptive=adaptive, lora=lora)
    config = json.loads((out / "config.json").read_text())
    if adaptive == 1 and not gated:
        mask_id = json.loads((out / "adaptive.json").read_text())["adaptive_ids"][0]
        assert vllm_mask_id(config) == tensorrt_mask_id(config) == mask_id
    else:
        with pytest.raises(ValueError, match="must have a mask token"):
            vllm_mask_id(config)


def test_adaptive_json_has_the_provenance_and_no_path(tmp_path: Path) -> None:
    out = exported(tmp_path)
    text = (out / "adaptive.json").read_text()
    value = json.loads(text)
    provenance = value["provenance"]
    assert provenance["data"] == "d" * 64 and provenance["commit"] == "c" * 40
    assert provenance["step"] == 9
    assert provenance["recipe"]["objective"]["name"] == "branch"
    assert "someone" not in text


@pytest.mark.parametrize("name", SHAPES)
def test_both_versions_of_transformers_read_of_an_export_what_the_base_model_is(
    name: str, tmp_path: Path
) -> None:
    """Transformers 4 took CodeLlama's rope_theta for 10,000: it knows no rope_parameters."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SHAPES[name]))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    base = AutoConfig.from_pretrained(tmp_path).to_dict()
    served = served_config(
        json.loads(file.read_text()), architecture="A", dtype="float16", mask_id=7
    )
    file.write_text(json.dumps(served))
    changed = {"architectures": ["A"], "dtype": "float16"}
    changed |= {"pard_token": 7, "ptd_token_id": 7}
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == {**base, **changed}
    assert served["rope_theta"] == SHAPES[name]["rope_theta"]
    assert served["torch_dtype"] == "float16"
    expected = dict(SHAPES[name].get("rope_scaling") or {})
    if "type" in expected:
        expected["rope_type"] = expected.pop("type")
    assert expected.items() <= (served["rope_scaling"] or {}).items()
    assert bool(served["rope_scaling"]) == bool(expected)
    partial = SHAPES[name].get("partial_rotary_factor")
    assert served.get("partial_rotary_factor") == partial


def test_keys_of_another_export_are_not_inherited() -> None:
    """A base model may be an export of ours, or have code of its own."""
    kinds = {
        "full_attention": {"rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    described = {"pard_token": 3, "ptd_token_id": 3, "auto_map": {"AutoModel": "m.Own"}}
    described["rope_parameters"] = kinds  # by layer type, which has no older spelling
    served = served_config(described, architecture="A", dtype="float32", mask_id=None)
    dtypes = {"dtype": "float32", "torch_dtype": "float32"}
    assert served == {"architectures": ["A"], "rope_parameters": kinds, **dtypes}


def test_a_generation_ends_where_texts_ended() -> None:
    """Without an end, as in some base models, a generation would not stop."""
    assert served_generation({}, bos=1, eos=2) == {"bos_token_id": 1, "eos_token_id": 2}
    own = {"eos_token_id": [5, 2], "temperature": 0.2, "bos_token_id": None}
    assert served_generation(own, bos=1, eos=2) == {**own, "bos_token_id": 1}
