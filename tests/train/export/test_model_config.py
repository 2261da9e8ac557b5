"""config.json by the library's own classes, of the families that are trained here."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from train.export.model_config import served_config, served_generation

# As their authors published them, less what the export does not look at. The last has no published shape.
SHAPES: dict[str, dict[str, Any]] = {
    "codellama-7b": {
        "model_type": "llama",
        "max_position_embeddings": 16384,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "vocab_size": 32016,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "codellama-34b": {
        "model_type": "llama",
        "max_position_embeddings": 16384,
        "rope_theta": 1000000,
        "num_key_value_heads": 8,
        "num_attention_heads": 64,
        "hidden_size": 8192,
        "vocab_size": 32001,
        "torch_dtype": "bfloat16",
    },
    "deepseek-coder": {
        "model_type": "llama",
        "max_position_embeddings": 16384,
        "rope_theta": 100000,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "vocab_size": 32256,
        "bos_token_id": 32013,
        "eos_token_id": 32014,
    },
    "llama-3.1": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "vocab_size": 128256,
        "eos_token_id": [128001, 128008, 128009],
    },
    "qwen2.5-coder": {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "max_position_embeddings": 16384,
        "rope_theta": 999999.4420358813,
        "sliding_window": 4096,
        "vocab_size": 49152,
    },
    "stablelm": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "vocab_size": 50304,
    },
}


def trained(folder: Path, shape: dict[str, Any]) -> dict[str, Any]:
    """The config.json that training writes of a base model."""
    (folder / "config.json").write_text(json.dumps(shape))
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", SHAPES)
def test_the_library_reads_of_an_export_what_it_read_of_the_base_model(name: str, tmp_path: Path) -> None:
    """Positions, rope, windows, ids, ties and rows."""
    described = trained(tmp_path, SHAPES[name])
    base = AutoConfig.from_pretrained(tmp_path).to_dict()
    served = served_config(described, architecture="ItsForCausalLM", dtype="float16", mask_id=7)
    (tmp_path / "config.json").write_text(json.dumps(served))
    found = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert found.pop("architectures") == ["ItsForCausalLM"] and found.pop("dtype") == "float16"
    assert (found.pop("pard_token"), found.pop("ptd_token_id")) == (7, 7)
    assert {name: value for name, value in base.items() if name not in ("architectures", "dtype")} == found
    for setting in ("max_position_embeddings", "vocab_size", "sliding_window", "tie_word_embeddings"):
        if SHAPES[name].get(setting) and SHAPES[name].get("use_sliding_window", True):
            assert found[setting] == SHAPES[name][setting]


@pytest.mark.parametrize("name", SHAPES)
def test_what_reads_the_older_names_finds_the_same_rope(name: str, tmp_path: Path) -> None:
    """Transformers 5 writes rope_parameters alone: Transformers 4 took 10,000 for CodeLlama's rope_theta of a
    million, and no scaling for deepseek-coder's.
    """
    shape = SHAPES[name]
    served = served_config(trained(tmp_path, shape), architecture="", dtype="float32", mask_id=None)
    assert served["rope_theta"] == shape["rope_theta"] and served["torch_dtype"] == "float32"
    wanted = dict(shape.get("rope_scaling") or {})
    if wanted:
        wanted.setdefault("rope_type", wanted.pop("type", None))
    scaling = served["rope_scaling"]
    assert bool(scaling) == bool(wanted) and (not scaling or wanted.items() <= scaling.items())
    assert served.get("partial_rotary_factor") == shape.get("partial_rotary_factor")


def test_keys_of_another_export_are_not_inherited() -> None:
    """A base model may be an export of ours, or have code of its own."""
    described = {"pard_token": 3, "ptd_token_id": 3, "auto_map": {"AutoModel": "modeling.Own"}, "own": 1}
    served = served_config(described, architecture="A", dtype="float32", mask_id=None)
    assert served == {"own": 1, "architectures": ["A"], "dtype": "float32", "torch_dtype": "float32"}


def test_rope_by_layer_type_keeps_its_only_spelling() -> None:
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    rope = {"rope_parameters": kinds}
    served = served_config(rope, architecture="A", dtype="float32", mask_id=None)
    assert "rope_theta" not in served and served["rope_parameters"] == rope["rope_parameters"]


def test_a_generation_ends_where_texts_ended() -> None:
    """A generation_config.json without an end, as some base models have it, would go on for ever."""
    assert served_generation({}, bos=1, eos=2) == {"bos_token_id": 1, "eos_token_id": 2}
    own = {"eos_token_id": [5, 2], "temperature": 0.2, "do_sample": True, "bos_token_id": None}
    assert served_generation(own, bos=1, eos=2) == {**own, "bos_token_id": 1}
