"""Exports of what was trained under every ZeRO stage: see live_worker.py for what is alive then."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conf import settings
from tests.train.live_worker import BFLOAT16, STAGES
from train.attention import register
from train.export.__main__ import main
from train.export.config import ExportConfig

ROOT = Path(__file__).parents[2]
TIED = "+model.shape.tie_word_embeddings=true"
LORA = ["objective=branch", "lora.rank=4"]
RUNS = {
    **STAGES,
    **{f"{name}-bf16": [*overrides, BFLOAT16] for name, overrides in STAGES.items()},
    **{f"{name}-tied": [*overrides, BFLOAT16, TIED] for name, overrides in STAGES.items()},
    "zero2-lora": [*STAGES["zero2"], BFLOAT16, *LORA],
    "zero3-lora": [*STAGES["zero3"], *LORA],
    "zero3-gated": [*STAGES["zero3"], BFLOAT16, *LORA, "lora.gated=true"],
    "causal": [*STAGES["zero1"], "objective=causal", "objective.soft=0"],
}


def train(folder: Path, data: Path, runs: dict[str, list[str]], *, ranks: int) -> Path:
    """The worker's folders."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    told = [f"{name}={','.join(overrides)}" for name, overrides in runs.items()]
    command = [sys.executable, *launch, "-m", "tests.train.live_worker", str(folder), str(data), *told]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def runs(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run, on two ranks."""
    return train(tmp_path_factory.mktemp("runs"), data_folder, RUNS, ranks=2)


def export(checkpoint: Path, out: Path, *overrides: str) -> Path:
    main(settings("export", ExportConfig, [f"checkpoint={checkpoint}", f"out={out}", *overrides]))
    return out


def logits(model: Path, ids: torch.Tensor) -> torch.Tensor:
    """By Transformers' own reading of the directory, with the kernel of the training."""
    lm = AutoModelForCausalLM.from_pretrained(model, attn_implementation=register("eager"))
    with torch.no_grad():
        return lm.eval()(input_ids=ids, use_cache=False).logits


def check_round_trip(run: Path, out: Path) -> None:
    """Every weight is the optimizer's to the last bit, and in float32 training so are the logits."""
    live = torch.load(run.with_name(f"{run.name}.live"))
    export(run, out, "dtype=fp32")
    lm = AutoModelForCausalLM.from_pretrained(out)
    written = dict(lm.named_parameters())
    assert written.keys() == live["masters"].keys()
    for name, master in live["masters"].items():
        assert torch.equal(written[name], master), name
    if live["logits"].dtype == torch.float32:
        assert torch.equal(logits(out, live["ids"]), live["logits"])


@pytest.mark.parametrize("name", [name for name in RUNS if "lora" not in name and "gated" not in name])
def test_an_export_is_what_was_trained_to_the_last_bit(runs: Path, tmp_path: Path, name: str) -> None:
    check_round_trip(runs / name, tmp_path / "model")


@pytest.mark.parametrize("name", [name for name in RUNS if "lora" in name])
def test_a_merged_adapter_acts_as_it_did_beside_the_weights(runs: Path, tmp_path: Path, name: str) -> None:
    """W + BA rounds once where Wx + BAx rounds per row."""
    live = torch.load(runs / f"{name}.live")
    out = export(runs / name, tmp_path / "model", "dtype=fp32")
    difference = (logits(out, live["ids"]) - live["logits"].float()).abs().max()
    assert difference < (1e-5 if live["logits"].dtype == torch.float32 else 0.05) * live["logits"].abs().max()


@pytest.mark.parametrize("name", [name for name in RUNS if "lora" in name or "gated" in name])
def test_a_kept_adapter_and_its_base_model_are_those_trained(runs: Path, tmp_path: Path, name: str) -> None:
    live = torch.load(runs / f"{name}.live")["masters"]
    out = export(runs / name, tmp_path / "model", "dtype=fp32", "lora=kept")
    written = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    for adapted, master in live.items():
        if "lora_" in adapted or "trainable_tokens" in adapted:
            one = adapter.pop(f"base_model.model.{adapted.replace('.default', '')}")
        else:
            one = written.pop(adapted.replace(".token_adapter.base_layer.", ".").replace(".base_layer.", "."))
        assert torch.equal(one, master), adapted
    assert not written and not adapter
