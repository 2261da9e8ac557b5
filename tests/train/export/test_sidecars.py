"""What lies beside the weights: read back by the library, and by decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from conf import UserError
from infer.models.checkpoint import load_adaptive, load_text
from tests.train.export.export_fixture import training
from train.export.sidecars import write_sidecars


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
    assert (config.vocab_size, config.dtype) == (manifest["vocab"]["size"], torch.bfloat16)
    assert config.architectures == ["LlamaForCausalLM"] and config.rope_parameters["rope_theta"] == 1e6
    mask = ours[0] if adaptive == 1 else None  # those who read these keys know one id alone
    assert (getattr(config, "pard_token", None), getattr(config, "ptd_token_id", None)) == (mask, mask)
    generation = GenerationConfig.from_pretrained(out)
    vocab = manifest["vocab"]
    assert (generation.bos_token_id, generation.eos_token_id) == (vocab["bos"], vocab["eos"])
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("def f(x):").input_ids
    assert ids == load_text(out).encode("def f(x):")
    assert tokenizer.decode([*ids, *ours], skip_special_tokens=True) == "def f(x):"
    if not adaptive:
        assert not (out / "adaptive.json").exists()
        return
    found = load_adaptive(out)
    assert (list(found.ids), found.L, found.bos, found.gated) == (ours, 2, vocab["bos"], False)
    assert found.control == {
        *vocab["adaptive"],
        *(vocab[n] for n in ("bos", "eos", "pre", "suf", "mid", "eot")),
    }


def test_a_gated_adapter_offers_servers_no_mask_token(tmp_path: Path) -> None:
    """They would load the base model's weights, which know nothing of it: every draft would be wrong."""
    checkpoint, manifest = training(tmp_path / "tuned")
    manifest["settings"]["lora"] = {"rank": 4, "gated": True}
    write_sidecars(checkpoint, tmp_path, manifest, step=9, dtype=torch.float32)
    assert "ptd_token_id" not in json.loads((tmp_path / "config.json").read_text())
    assert load_adaptive(tmp_path).gated


def test_adaptive_json_tells_what_made_the_model_and_no_path(tmp_path: Path) -> None:
    out = exported(tmp_path)
    value = json.loads((out / "adaptive.json").read_text())
    assert list(value["infilling_orders"]) == ["psm"]  # the data had no document in the other order
    told = value["provenance"]
    assert (told["data"], told["step"], told["commit"]) == ("d" * 64, 9, "c" * 40)
    assert told["recipe"]["objective"]["name"] == "branch" and told["recipe"]["optimizer"] == {"lr": 1e-4}
    assert "someone" not in (out / "adaptive.json").read_text()


def test_a_training_of_before_these_facts_is_exported_too(tmp_path: Path) -> None:
    checkpoint, manifest = training(tmp_path / "tuned")
    for name in ("base", "data", "tokenizer"):
        del manifest[name]
    out = tmp_path / "model"
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.float32)
    assert list(json.loads((out / "adaptive.json").read_text())["infilling_orders"]) == ["psm", "spm"]


def test_what_else_lies_in_the_folder_stays_there(tmp_path: Path) -> None:
    """The whole folder was copied, and links in it followed: another's weights, or a key, were published."""
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
    (described / "chat_template.jinja").symlink_to(tmp_path / "key")
    with pytest.raises(UserError, match=r"chat_template\.jinja: wanted a file .*, found a link to"):
        write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.float32)
