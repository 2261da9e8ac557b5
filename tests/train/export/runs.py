"""Train with every ZeRO stage by live_worker.py, and export the training folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.errors import UserError
from conf.runs.files import read_result, write_json
from conf.settings.compose import settings
from tests import warm
from tests.train.export.live_worker import BFLOAT16, STAGES
from train.attention import register
from train.export import ExportConfig
from train.export.__main__ import main

TIED = "+model.shape.tie_word_embeddings=true"
LORA = ["objective=branch", "lora.rank=4"]
GATED = [*LORA, "lora.gated=true"]


def mixture(kind: str, experts: str = "num_experts") -> list[str]:
    """Return settings of a tiny mixture of experts that does not just repeat one token."""
    shape = {"model_type": kind, experts: 4, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        shape["moe_intermediate_size"] = 16
    lively = "++model.shape.initializer_range=0.3"
    return [lively, *(f"+model.shape.{name}={value}" for name, value in shape.items())]


MIXTURES = {
    "qwen3_moe-gated": [*STAGES["zero3"], *GATED, *mixture("qwen3_moe")],
    "olmoe-gated": [*STAGES["zero2"], BFLOAT16, *GATED, *mixture("olmoe")],
    "mixtral-lora": [*STAGES["zero1"], *LORA, *mixture("mixtral", "num_local_experts")],
}
RUNS = {
    "zero0-bf16": [*STAGES["zero0"], BFLOAT16],
    "zero1-qwen2": [*STAGES["zero1"], "+model.shape.model_type=qwen2"],
    "zero2-tied": [*STAGES["zero2"], BFLOAT16, TIED],
    "zero3": STAGES["zero3"],
    "zero2-lora": [*STAGES["zero2"], BFLOAT16, *LORA],
    "zero3-lora": [*STAGES["zero3"], *LORA],
    "zero3-gated": [*STAGES["zero3"], BFLOAT16, *GATED],
    **MIXTURES,
    "causal": [*STAGES["zero1"], "objective=causal", "objective.soft=0"],
}
PLAIN = [name for name, overrides in RUNS.items() if "lora.rank=4" not in overrides]
ADAPTED = [name for name in RUNS if name not in {*PLAIN, *MIXTURES}]


def train(folder: Path, data: Path, runs: dict[str, list[str]], *, ranks: int) -> Path:
    args = [f"{name}={','.join(overrides)}" for name, overrides in runs.items()]
    run = warm.run_ranks(
        "tests.train.export.live_worker", folder, data, *args, ranks=ranks
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def export(checkpoint: Path, out: Path, *overrides: str) -> Path:
    args = [f"checkpoint={checkpoint}", f"out={out}", *overrides]
    args.append("tracker.mode=disabled")
    main(settings("export", ExportConfig, args))
    return out


def logits(model: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the Transformers model, with the attention kernel of the training."""
    lm = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation=register("eager")
    )
    with torch.no_grad():
        return lm.eval()(input_ids=ids, use_cache=False).logits


def refused(run: Path, out: Path, *overrides: str) -> str:
    """Return the error message of an export; assert that it wrote no folder."""
    with pytest.raises(UserError) as error:
        export(run, out, *overrides)
    assert not out.exists()
    return str(error.value)


def change(file: Path, **changed: Any) -> None:
    """Change values of a JSON file."""
    write_json(file, {**read_result(file), **changed})
