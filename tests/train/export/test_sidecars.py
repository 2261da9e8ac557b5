"""The files beside the weights, read back by Transformers and by decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from infer.models.checkpoint import ModelDirectory
from tests.train.export.export_fixture import training
from train.export.sidecars import served_config, served_generation, write_sidecars

# config.json as their authors published it, without what the export ignores. stablelm's shape is not published.
LONG = {"max_position_embeddings": 16384}
LLAMA_3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_type": "llama3",
}
SHAPES: dict[str, dict[str, Any]] = {
    "codellama-7b": {
        **LONG,
        "model_type": "llama",
        "rope_theta": 1000000,
        "rope_scaling": None,
        "vocab_size": 32016,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "deepseek-coder": {
        **LONG,
        "model_type": "llama",
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
        "rope_scaling": {**LLAMA_3, "original_max_position_embeddings": 8192},
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
    "stablelm": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "vocab_size": 50304,
    },
}


def exported(tmp_path: Path, **facts: Any) -> Path:
    checkpoint, manifest = training(tmp_path / "tuned", **facts)
    out = tmp_path / "model"
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.bfloat16)
    return out


@pytest.mark.parametrize("adaptive", [0, 1, 2])
def test_an_export_says_what_training_knew(adaptive: int, tmp_path: Path) -> None:
    out = exported(tmp_path, adaptive=adaptive)
    manifest = json.loads((tmp_path / "tuned" / "manifest.json").read_text())
    config, ours = AutoConfig.from_pretrained(out), manifest["adaptive"]
    assert (config.vocab_size, config.dtype) == (
        manifest["vocab"]["size"],
        torch.bfloat16,
    )
    assert (
        config.architectures == ["LlamaForCausalLM"]
        and config.rope_parameters["rope_theta"] == 1e6
    )
    mask = ours[0] if adaptive == 1 else None  # readers of these keys know a single id
    assert (
        getattr(config, "pard_token", None),
        getattr(config, "ptd_token_id", None),
    ) == (mask, mask)
    generation = GenerationConfig.from_pretrained(out)
    vocab = manifest["vocab"]
    assert (generation.bos_token_id, generation.eos_token_id) == (
        vocab["bos"],
        vocab["eos"],
    )
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("def f(x):").input_ids
    assert ids == ModelDirectory(out).text.encode("def f(x):")
    assert tokenizer.decode([*ids, *ours], skip_special_tokens=True) == "def f(x):"
    if not adaptive:
        assert not (out / "adaptive.json").exists()
        return
    loaded = ModelDirectory(out).need_adaptive()
    assert (list(loaded.ids), loaded.L, loaded.bos, loaded.gated) == (
        ours,
        2,
        vocab["bos"],
        False,
    )
    assert loaded.control == {
        *vocab["adaptive"],
        *(vocab[n] for n in ("bos", "eos", "pre", "suf", "mid", "eot")),
    }


def test_a_gated_adapter_offers_servers_no_mask_token(tmp_path: Path) -> None:
    """They would load only the base model's weights: every draft would be wrong."""
    checkpoint, manifest = training(tmp_path / "tuned")
    manifest["settings"]["lora"] = {"rank": 4, "gated": True}
    write_sidecars(checkpoint, tmp_path, manifest, step=9, dtype=torch.float32)
    assert "ptd_token_id" not in json.loads((tmp_path / "config.json").read_text())
    assert ModelDirectory(tmp_path).need_adaptive().gated


def test_adaptive_json_has_the_provenance_and_no_path(tmp_path: Path) -> None:
    out = exported(tmp_path)
    value = json.loads((out / "adaptive.json").read_text())
    assert list(value["infilling_orders"]) == [
        "psm"
    ]  # the data had no document in the other order
    made_of = value["provenance"]
    assert (made_of["data"], made_of["step"], made_of["commit"]) == (
        "d" * 64,
        9,
        "c" * 40,
    )
    assert made_of["recipe"]["objective"]["name"] == "branch" and made_of["recipe"][
        "optimizer"
    ] == {"lr": 1e-4}
    assert "someone" not in (out / "adaptive.json").read_text()


def test_a_training_of_an_earlier_version_is_exported(tmp_path: Path) -> None:
    checkpoint, manifest = training(tmp_path / "tuned")
    for name in ("base", "data", "tokenizer"):
        del manifest[name]
    out = tmp_path / "model"
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.float32)
    assert list(
        json.loads((out / "adaptive.json").read_text())["infilling_orders"]
    ) == ["psm", "spm"]


def test_only_the_tokenizers_files_are_copied(tmp_path: Path) -> None:
    """The whole folder was copied, and links in it followed: other weights, or a key, were published."""
    checkpoint, manifest = training(tmp_path / "tuned")
    described, out = checkpoint / "model", tmp_path / "model"
    (tmp_path / "key").write_text("secret")
    (described / "pytorch_model.bin").write_text("other weights")
    (described / "more").mkdir()
    (described / "key").symlink_to(tmp_path / "key")
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.float32)
    assert sorted(path.name for path in out.iterdir()) == [
        "adaptive.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def trained(folder: Path, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that training writes for a base model."""
    (folder / "config.json").write_text(json.dumps(shape))
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", SHAPES)
def test_the_library_reads_of_an_export_what_it_read_of_the_base_model(
    name: str, tmp_path: Path
) -> None:
    """Positions, rope, windows, ids, ties and rows."""
    described = trained(tmp_path, SHAPES[name])
    base = AutoConfig.from_pretrained(tmp_path).to_dict()
    served = served_config(
        described, architecture="ItsForCausalLM", dtype="float16", mask_id=7
    )
    (tmp_path / "config.json").write_text(json.dumps(served))
    read = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert (
        read.pop("architectures") == ["ItsForCausalLM"]
        and read.pop("dtype") == "float16"
    )
    assert (read.pop("pard_token"), read.pop("ptd_token_id")) == (7, 7)
    assert {
        name: value
        for name, value in base.items()
        if name not in ("architectures", "dtype")
    } == read
    for setting in (
        "max_position_embeddings",
        "vocab_size",
        "sliding_window",
        "tie_word_embeddings",
    ):
        if SHAPES[name].get(setting) and SHAPES[name].get("use_sliding_window", True):
            assert read[setting] == SHAPES[name][setting]


@pytest.mark.parametrize("name", SHAPES)
def test_readers_of_the_older_names_find_the_same_rope(
    name: str, tmp_path: Path
) -> None:
    """Transformers 5 writes only rope_parameters: Transformers 4 took CodeLlama's rope_theta for 10,000."""
    shape = SHAPES[name]
    served = served_config(
        trained(tmp_path, shape), architecture="", dtype="float32", mask_id=None
    )
    assert (
        served["rope_theta"] == shape["rope_theta"]
        and served["torch_dtype"] == "float32"
    )
    expected = dict(shape.get("rope_scaling") or {})
    if expected:
        expected.setdefault("rope_type", expected.pop("type", None))
    scaling = served["rope_scaling"]
    assert bool(scaling) == bool(expected) and (
        not scaling or expected.items() <= scaling.items()
    )
    assert served.get("partial_rotary_factor") == shape.get("partial_rotary_factor")


def test_keys_of_another_export_are_not_inherited() -> None:
    """A base model may be an export of ours, or have code of its own."""
    described = {
        "pard_token": 3,
        "ptd_token_id": 3,
        "auto_map": {"AutoModel": "modeling.Own"},
        "own": 1,
    }
    served = served_config(described, architecture="A", dtype="float32", mask_id=None)
    assert served == {
        "own": 1,
        "architectures": ["A"],
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def test_rope_by_layer_type_keeps_its_only_spelling() -> None:
    kinds = {
        "full_attention": {"rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    rope = {"rope_parameters": kinds}
    served = served_config(rope, architecture="A", dtype="float32", mask_id=None)
    assert (
        "rope_theta" not in served
        and served["rope_parameters"] == rope["rope_parameters"]
    )


def test_a_generation_ends_where_texts_ended() -> None:
    """A generation_config.json without an end, as some base models have it, would go on for ever."""
    assert served_generation({}, bos=1, eos=2) == {"bos_token_id": 1, "eos_token_id": 2}
    own = {
        "eos_token_id": [5, 2],
        "temperature": 0.2,
        "do_sample": True,
        "bos_token_id": None,
    }
    assert served_generation(own, bos=1, eos=2) == {**own, "bos_token_id": 1}
