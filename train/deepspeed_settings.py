"""Check the user's DeepSpeed settings: keep supported ones, reject the rest with an alternative.

A file may be written for another trainer: the value "auto" takes this project's setting, and
disabled blocks are dropped. This module does not import DeepSpeed.
"""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from conf.errors import describe_error

AUTO = "auto"
FILE = "file"  # the setting that names a JSON file
#: Settings that DeepSpeed gets unchanged; SUPPORTED has the settings of each block.
TOP_LEVEL = {
    "zero_optimization",
    "data_types",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "wall_clock_breakdown",
    "memory_breakdown",
}
ZERO = {
    "stage",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "offload_param",
    "offload_optimizer",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "ignore_unused_parameters",
    "parameter_alignment",
    "memory_efficient_linear",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
}
OFFLOAD = {"device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"}
#: The supported settings of each block.
SUPPORTED = {
    "": TOP_LEVEL,
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": OFFLOAD,
    "zero_optimization.offload_optimizer": OFFLOAD | {"fast_init"},
    "data_types": {"grad_accum_dtype"},
}
#: The dtypes that gradients are added up in, by DeepSpeed's names.
ACCUMULATION = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
}
#: The alternative to each unsupported setting, for the error message.
ALTERNATIVES = {
    "optimizer": "Use optimizer.name, optimizer.lr and the other settings of optimizer",
    "scheduler": "Use optimizer.lr, optimizer.warmup_steps and optimizer.min_lr",
    "fp16": "Use dtype=bfloat16",
    "torch_autocast": "Use dtype=bfloat16",
    "amp": "Use dtype=bfloat16",
    "activation_checkpointing": "Use model.activation_checkpointing=true",
    "compile": "Use model.compile=true",
    "sparse_attention": "Use model.attention",
    "flops_profiler": "Use plan=true to count operations, and log.jsonl for tokens/s and MFU",
    "comms_logger": "Use deepspeed.wall_clock_breakdown=true",
    "sequence_parallel_size": "Use deepspeed=zero3 and a smaller micro_batch",
    "tensor_parallel": "Use deepspeed=zero3, which divides the model over ranks",
    "pipeline": "Use deepspeed=zero3, which divides the model over ranks",
    "expert_parallel": "Use deepspeed=zero3, which divides the model over ranks",
    "aio": "Use deepspeed.zero_optimization.offload_optimizer.device=cpu",
    "autotuning": "Use plan=true, which prints the memory of a step",
    "elasticity": "Repeat the command to continue a run on another number of ranks",
    "checkpoint": "Use save_every and keep_last",
    "nebula": "Use save_every and keep_last",
    "datastates": "Use save_every and keep_last",
    "tensorboard": "Use tracker, or log.jsonl",
    "wandb": "Use tracker.mode=online",
    "comet": "Use tracker, or log.jsonl",
    "csv_monitor": "Use log.jsonl",
    "monitor_config": "Use tracker, or log.jsonl",
    "curriculum_learning": "data_prep and seed determine the order of the data",
    "data_efficiency": "data_prep and seed determine the order of the data",
    "dataloader_drop_last": "A step always has global_batch sequences",
    "zero_force_ds_cpu_optimizer": "Offloaded states also use PyTorch's optimizer",
    "log_level": "Set the environment variable DEEPSPEED_LOG_LEVEL",
    "zero_optimization.cpu_offload": "Use deepspeed=zero2_offload",
    # DeepSpeed's converter to another number of ranks mixes up weights with it.
    "zero_optimization.round_robin_gradients": "A run with it could not continue on other ranks",
    "zero_optimization.compute_grad_norm": "log.jsonl has the norm of every step",
}


def normalize(
    user_settings: Mapping[str, Any],
    *,
    dtype: str,
    optimizer: str,
    filled: Mapping[str, tuple[str, Any]],
) -> dict[str, Any]:
    """Return the settings for DeepSpeed, without the ones that training fills in.

    `filled` maps DeepSpeed's name of a setting that training fills in to this project's
    setting and its value, or to None as value if it is computed from several settings.
    Raises ValueError for an unsupported setting, and for a value that contradicts `filled`.
    """
    settings = _load(user_settings)
    _check_bf16(settings.pop("bf16", None), dtype)
    settings = {name: value for name, value in settings.items() if not _is_off(value)}
    settings.pop("steps_per_print", None)  # log.jsonl contains every step
    settings.pop("zero_allow_untested_optimizer", None)
    for name, (setting, value) in filled.items():
        if name in settings and (got := settings.pop(name)) != value:
            allowed = "auto" if value is None else f"auto or {setting}={value}"
            raise ValueError(
                f"deepspeed.{name} must be {allowed}, got {got}. Set {setting}"
            )
    for name, kind in (("optimizer", optimizer), ("scheduler", "warmupcosinelr")):
        block = settings.get(name)
        if isinstance(block, Mapping) and str(block.get("type")).lower() == kind:
            params = {key: value for key, value in block.items() if key != "type"}
            settings[name] = params if not _is_off(params) else None
    supported = _supported("", settings)
    _check_stage(supported)
    _check_divisor(supported)
    _check_accumulation(supported, dtype)
    return supported


def _check_stage(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown stage of ZeRO, and a setting that needs another one."""
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):  # True equals 1
        raise ValueError(
            f"deepspeed.zero_optimization.stage must be 0, 1, 2 or 3, got {stage}"
        )
    for name, present, stages in (
        ("prescale_gradients", settings.get("prescale_gradients"), (0,)),
        # In stages 2 and 3 DeepSpeed ends in an assertion.
        (
            "gradient_predivide_factor",
            settings.get("gradient_predivide_factor", 1) != 1,
            (0,),
        ),
        ("zero_optimization.offload_optimizer", "offload_optimizer" in zero, (1, 2, 3)),
        ("zero_optimization.offload_param", "offload_param" in zero, (3,)),
    ):
        if present and stage not in stages:
            needed = " or ".join(map(str, stages))
            raise ValueError(
                f"deepspeed.{name} needs stage {needed} of ZeRO, got stage {stage}. "
                "Leave it out, or set deepspeed.zero_optimization.stage"
            )


def _check_divisor(settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless gradients are divided by a positive number."""
    divisor = settings.get("gradient_predivide_factor", 1)
    if type(divisor) not in (int, float) or not divisor > 0:
        raise ValueError(
            f"deepspeed.gradient_predivide_factor must be a number above 0, got {divisor}"
        )


def _check_accumulation(settings: Mapping[str, Any], dtype: str) -> None:
    """Raise ValueError for an unknown dtype of gradients, or one that stage 0 does not support."""
    given = settings.get("data_types", {}).get("grad_accum_dtype")
    if given is not None and str(given) not in ACCUMULATION:
        raise ValueError(
            f"deepspeed.data_types.grad_accum_dtype must be bf16 or fp32, got {given}"
        )
    needed = ACCUMULATION.get(given, dtype)
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if stage == 0 and needed != dtype:
        raise ValueError(
            f"deepspeed.data_types.grad_accum_dtype={given} needs dtype={needed} in stage 0 "
            f"of ZeRO, got dtype={dtype}. Leave it out, or set "
            "deepspeed.zero_optimization.stage"
        )


def _load(user_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the named file, overridden by the user's other settings."""
    overrides = {name: value for name, value in user_settings.items() if name != FILE}
    if FILE not in user_settings:
        return overrides
    path = Path(str(user_settings[FILE])).expanduser()
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = "no such file"
    except OSError as error:
        reason = describe_error(error)
    except ValueError as error:
        reason = f"invalid JSON ({error})"
    else:
        if isinstance(settings, dict):
            return _merge(settings, overrides)
        reason = f"a JSON {type(settings).__name__}"
    raise ValueError(
        f"deepspeed={path} must be a JSON file of DeepSpeed's settings, got {reason}"
    )


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `base`, overridden by `overrides` at any depth."""
    merged = dict(base)
    for name, value in overrides.items():
        inner = merged.get(name)
        blocks = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = _merge(inner, value) if blocks else value  # type: ignore[arg-type]
    return merged


def _is_off(value: Any) -> bool:
    """Return whether a value is "auto", null or false, or a block of such values."""
    if isinstance(value, Mapping):
        off = value.get("enabled") in (False, AUTO)
        return off or all(map(_is_off, value.values()))
    return value is None or value is False or value == AUTO


def _check_bf16(block: Any, dtype: str) -> None:
    """Raise ValueError if the bf16 block contradicts the dtype of the weights."""
    if block is None:
        return
    if not isinstance(block, Mapping):
        raise ValueError(f"deepspeed.bf16 must be a block of settings, got {block}")
    enabled = block.get("enabled", AUTO)
    if enabled != AUTO and enabled is not {"bfloat16": True, "float32": False}.get(
        dtype
    ):
        cure = "bfloat16" if enabled else "float32"
        raise ValueError(
            f"deepspeed.bf16.enabled must be auto or match dtype={dtype}, got "
            f"{str(enabled).lower()}. Set dtype={cure}"
        )
    for name, value in block.items():
        if name != "enabled" and not _is_off(value):
            raise ValueError(_unsupported(f"bf16.{name}"))


def _supported(block_name: str, block: Any) -> dict[str, Any]:
    """Return the supported settings of a block, without "auto" values and disabled blocks.

    Raises ValueError for an unsupported setting that is not off.
    """
    if not isinstance(block, Mapping):
        raise ValueError(
            f"deepspeed.{block_name} must be a block of settings, got {block}"
        )
    names = SUPPORTED[block_name]
    result: dict[str, Any] = {}
    for name, value in block.items():
        full = f"{block_name}.{name}".lstrip(".")
        if value is None or value == AUTO:
            continue
        if name not in names:
            if _is_off(value):
                continue
            near = get_close_matches(name, names, n=1)
            raise ValueError(_unsupported(full, near))
        if full not in SUPPORTED:
            result[name] = value
        elif inner := _supported(full, value):
            result[name] = inner
    device = result.get("device", "none")
    if device not in ("cpu", "none"):
        raise ValueError(
            f"deepspeed.{block_name}.device must be cpu, got {device}. "
            f"Leave {block_name} out to offload nothing"
        )
    return {} if "device" in names and device == "none" else result


def _unsupported(name: str, near: Sequence[str] = ()) -> str:
    """Return the error message for an unsupported setting; `near` are similar names."""
    cure = ALTERNATIVES.get(
        name, "See docs/training.md for the settings that training supports"
    )
    if near and name not in ALTERNATIVES:
        cure = f"Did you mean {near[0]}?"
    return f"deepspeed.{name} must be left out: training does not use it. {cure}"
