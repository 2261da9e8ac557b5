"""Gated LoRA by the users' own commands: trained under ZeRO 3, exported, decoded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from conf import settings
from infer.__main__ import main as infer
from infer.config import InferConfig
from tests.test_pipeline import BATCH, QUIET, SHORT, command


@pytest.fixture(scope="module")
def base_model(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model of the data's vocabulary, in bfloat16."""
    out = tmp_path_factory.mktemp("lora") / "base"
    vocab = json.loads((data_folder / "manifest.json").read_text())["vocab"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab["size"],
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=vocab["bos"],
        eos_token_id=vocab["eos"],
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    return out


def test_gated_lora_from_training_to_decoding(
    data_folder: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned, model = base_model.with_name("tuned"), base_model.with_name("model")
    recipe = [
        "experiment=demo",
        "deepspeed=zero3",
        "objective=branch",
        "lora.rank=4",
        "lora.gated=true",
    ]
    folders = [f"data.path={data_folder}", f"model.path={base_model}", f"out={tuned}"]
    command("train", *recipe, *folders, *SHORT, *BATCH, ranks=2)
    validation = json.loads((tuned / "manifest.json").read_text())["validation"]
    assert len({row["standard_loss"] for row in validation}) == 1
    assert validation[-1]["masked_loss"] < validation[0]["masked_loss"]

    command("train.export", f"checkpoint={tuned}", f"out={model}", QUIET)
    assert json.loads((model / "adaptive.json").read_text())["gated"] is True
    file = "model.safetensors"
    weights, theirs = load_file(model / file), load_file(base_model / file)
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)

    shutil.copy(model / "tokenizer.json", base_model)  # which came without one
    texts = []
    prompt = ["prompt=def f(x):", "decode.max_new_tokens=24", "dtype=float32"]
    drafted = ["decode=hybrid", "decode.k=4", "decode.probes=root"]
    for folder, decode in [
        (base_model, ["decode=plain"]),
        (model, ["decode=plain"]),
        (model, drafted),
    ]:
        capsys.readouterr()
        infer(settings("infer", InferConfig, [f"model={folder}", *decode, *prompt]))
        texts.append(capsys.readouterr().out)
    assert texts[0].strip() and texts[0] == texts[1] == texts[2]
