"""Test which DeepSpeed settings training accepts, fills in and refuses before a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.settings.compose import settings
from train.config import TrainConfig
from train.deepspeed_settings import ALTERNATIVES
from train.engine import check_deepspeed_settings, deepspeed_config

#: From Transformers' documentation; its trainer fills in the values "auto".
PUBLISHED: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": False, "profile_step": 1},
}


def composed(block: dict[str, Any], folder: Path, *overrides: str) -> TrainConfig:
    """Return the training settings with a DeepSpeed file that has this content."""
    file = folder / "my 'ds' config.json"
    file.write_text(json.dumps(block))
    arguments = [f"deepspeed={file}", "model=tiny", *overrides]
    return settings("train", TrainConfig, arguments)


def test_a_published_file_is_accepted(tmp_path: Path) -> None:
    config = composed(PUBLISHED, tmp_path, "global_batch=16", "micro_batch=2")
    zero = PUBLISHED["zero_optimization"]
    expected = {name: value for name, value in zero.items() if value != "auto"}
    del expected["offload_param"]
    assert config.deepspeed == {"zero_optimization": expected}
    assert config.stage == 3
    check_deepspeed_settings(config.deepspeed)
    engine_config = deepspeed_config(config, ranks=4)
    assert (
        engine_config["train_batch_size"] == 16
        and engine_config["gradient_clipping"] == 1.0
    )
    assert engine_config["gradient_accumulation_steps"] == 2


def test_overrides_take_precedence_over_the_file(tmp_path: Path) -> None:
    stage = "+deepspeed.zero_optimization.stage=2"
    config = composed(PUBLISHED, tmp_path, stage)
    assert config.stage == 2 and config.zero["overlap_comm"]


def test_values_that_equal_the_training_settings_are_accepted(tmp_path: Path) -> None:
    block = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "activation_checkpointing": {"partition_activations": False},
        "tensorboard": {"enabled": False, "output_path": "logs"},
    }
    overrides = ["global_batch=64", "micro_batch=2", "optimizer.clip=0.5"]
    config = composed(block, tmp_path, *overrides, "dtype=bfloat16")
    assert config.deepspeed == {}


#: DeepSpeed accepted these, but they had no effect or the first step failed.
UNSUPPORTED: dict[str, Any] = {
    "activation_checkpointing": {"partition_activations": True},
    "compile": {"deepcompile": True},
    "flops_profiler": {"enabled": True},
    "sequence_parallel_size": 2,
    "tensor_parallel": {"autotp_size": 2},
    "autotuning": {"enabled": True},
    "elasticity": {"enabled": True},
    "curriculum_learning": {"enabled": True},
    "compression_training": {"weight_quantization": {"shared": 1}},
    "pipeline": {"stages": 2},
    "csv_monitor": {"enabled": True},
    "fp16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "checkpoint": {"load_universal": True},
    "comms_logger": {"enabled": True},
    "progressive_layer_drop": {"enabled": True},
    "zero_optimization": {"compute_grad_norm": False, "zero_quantized_weights": True},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_block_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as error:
        composed({name: UNSUPPORTED[name]}, tmp_path)
    message = str(error.value)
    assert message.startswith(f"deepspeed.{name}") and "must be left out" in message
    assert message.endswith(ALTERNATIVES.get(name, "that training supports"))


REFUSED = [
    ({"train_batch_size": 7}, "must be auto or global_batch=128, got 7. Set global"),
    ({"gradient_clipping": 3}, "must be auto or optimizer.clip=1.0, got 3"),
    ({"gradient_accumulation_steps": 4}, "steps must be auto, got 4. Set global_batch"),
    ({"bf16": {"enabled": True}}, "or match dtype=auto, got true. Set dtype=bfloat16"),
    ({"bf16": {"enabled": False}}, "or match dtype=auto, got false. Set dtype=float32"),
    ({"bf16": 1}, "deepspeed.bf16 must be a block of settings, got 1"),
    ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states must be"),
    ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag .* mean stage?"),
    ({"zero_optimization": {"stage": True}}, "stage must be 0, 1, 2 or 3, got True"),
    ({"zero_optimization": 3}, "zero_optimization must be a block of settings, got 3"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        "offload_optimizer.device must be cpu, got nvme",
    ),
    (
        {"zero_optimization": {"stage": 2}, "prescale_gradients": True},
        "prescale_gradients needs stage 0 of ZeRO, got stage 2",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "offload_param needs stage 3 of ZeRO, got stage 2",
    ),
    ({"zero_force_ds_cpu_optimizer": True}, "optimizer must be left out"),
    # Bug: DeepSpeed's NotImplementedError, after the model was loaded.
    (
        {"data_types": {"grad_accum_dtype": "fp32"}},
        "grad_accum_dtype=fp32 needs dtype=float32 in stage 0 of ZeRO, got dtype=auto",
    ),
    # Bug: a traceback of DeepSpeed's DtypeEnum.
    (
        {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "foo"}},
        "grad_accum_dtype must be bf16 or fp32, got foo",
    ),
    # Bug: an AssertionError of DeepSpeed after the model was loaded.
    (
        {"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor needs stage 0 of ZeRO, got stage 2",
    ),
    # Bug: a ZeroDivisionError and a TypeError in the first backward pass.
    ({"gradient_predivide_factor": 0}, "must be a number above 0, got 0"),
    ({"gradient_predivide_factor": "two"}, "must be a number above 0, got two"),
    # Bug: on another number of ranks such a run continued with mixed-up weights.
    (
        {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
        "round_robin_gradients must be left out.* could not continue on other ranks",
    ),
    # Bug: "invalid literal for int() with base 10", and for lists "unknown setting".
    ({"zero_optimization": {"stage": "abc"}}, "stage must be 0, 1, 2 or 3, got abc"),
    ({"zero_optimization": {"stage": [1]}}, r"stage must be 0, 1, 2 or 3, got \[1\]"),
    (
        {"data_types": {"grad_accum_dtype": ["a"]}},
        r"grad_accum_dtype must be bf16 or fp32, got \['a'\]",
    ),
]


@pytest.mark.parametrize(("block", "message"), REFUSED)
def test_contradictory_values_are_refused(
    tmp_path: Path, block: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        composed(block, tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such file"), ("[1]", "a JSON list"), ("{'stage': 2}", "invalid JSON")],
)
def test_an_unreadable_file_is_refused(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    file = tmp_path / "ds.json"
    if content:
        file.write_text(content)
    with pytest.raises(UserError, match=f"^deepspeed={file} must be .*got {reason}"):
        settings("train", TrainConfig, [f"deepspeed={file}", "model=tiny"])
