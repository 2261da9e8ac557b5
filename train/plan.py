"""plan=true: what a training run would do, without weights or a GPU, and whether it fits."""

from typing import Any

import torch
from rich.table import Table
from transformers import PretrainedConfig

from conf import UserError
from conf.console import PlainConsole
from conf.stage import read_manifest
from data_prep.vocab import Vocab
from train.config import TrainConfig
from train.flops import expected_work, peak_flops, step_flops
from train.memory import GIB, RESERVED, Memory, estimate_memory, machine_memory
from train.pretrained import check_architecture, model_config, skeleton

# The name by torch.cuda.get_device_name, and the GiB that one process has for tensors and code.
DEVICES = {
    "a100_40gb": ("NVIDIA A100-SXM4-40GB", 39.4),
    "a100_80gb": ("NVIDIA A100-SXM4-80GB", 79.2),
    "h100_80gb": ("NVIDIA H100 80GB HBM3", 79.1),
    "h200_141gb": ("NVIDIA H200", 139.8),
    "l40s_48gb": ("NVIDIA L40S", 44.4),
    "rtx4090_24gb": ("NVIDIA GeForce RTX 4090", 23.6),
}
CLOSE = 0.9  # above this share of the memory an estimate of fitting may be wrong
USUAL = (0.4, 0.3)  # shares of a device's peak that are assumed by default
MACHINE = 8  # GPUs of one machine, whose memory the ranks share


def print_plan(config: TrainConfig) -> None:
    """Print model, objective, data, steps, batch arithmetic, operations, hours and memory per GPU."""
    table = Table(title="training plan", show_header=False)
    for name, value in plan(config).items():
        table.add_row(name, value)
    PlainConsole().print(table)


def plan(config: TrainConfig) -> dict[str, str]:
    """Return the plan's lines. Raise UserError for settings that no run could have."""
    data = (
        read_manifest(config.data.path, "shards", "data.path")
        if config.data.path
        else None
    )
    vocab = Vocab.from_json(data["vocab"]) if data else None
    architecture = model_config(
        config.model, vocab=vocab if config.model.path else None
    )
    if vocab is not None:
        architecture.vocab_size = max(architecture.vocab_size, vocab.size)
    seq_len: int = data["seq_len"] if data else architecture.max_position_embeddings
    check_architecture(architecture, seq_len=seq_len)
    return {
        **_what(config, architecture),
        **_batch(config, data, seq_len),
        **_cost(config, architecture, seq_len),
        **_memory(config, architecture, seq_len),
    }


def _what(config: TrainConfig, architecture: PretrainedConfig) -> dict[str, str]:
    parameters = sum(
        parameter.numel() for parameter in skeleton(architecture).parameters()
    )
    objective = config.objective
    optimizer = config.optimizer
    lora = config.lora
    parts = [objective.name]
    if objective.name != "causal":
        share = f" ({100 * objective.wide_share:g} % of the windows up to {objective.L_max})"
        parts.append(f"L={objective.L}{share if objective.wide_share else ''}")
        parts += [
            f"w={objective.w:g}",
            "diverse tokens" if objective.diverse else "one adaptive token",
        ]
    adapter = f"LoRA of rank {lora.rank}{', gated' if lora.gated else ''}"
    return {
        "model": f"{config.model.path or 'the shape of the settings'}: {architecture.model_type}, "
        f"{parameters / 1e9:.2f}B parameters",
        "objective": ", ".join(parts),
        "trained": adapter if lora.rank else "every weight",
        "steps": f"{config.steps:,}, learning rate {optimizer.lr:g} to {optimizer.min_lr:g}, "
        f"warm-up {optimizer.warmup_steps}",
    }


def _batch(
    config: TrainConfig, data: dict[str, Any] | None, seq_len: int
) -> dict[str, str]:
    step = config.global_batch * seq_len
    ranks = config.plan_ranks
    computed = expected_work(config.objective, seq_len).rows / seq_len * step
    lines = {
        "batch": f"{config.global_batch} sequences of {seq_len:,} = {ranks} ranks x {config.micro_batch} x "
        f"{config.accumulations(ranks)} accumulations",
        "tokens per step": f"{_count(step)} of data, {_count(computed)} computed",
        "tokens in all": f"{_count(config.steps * step)} of data, {_count(config.steps * computed)} computed",
    }
    if data:
        epochs = config.steps * config.global_batch / data["train"]["sequences"]
        lines["data"] = (
            f"{config.data.path}: {_count(data['train']['tokens'])} tokens, read {epochs:.2f} times"
        )
    return lines


def _cost(
    config: TrainConfig, architecture: PretrainedConfig, seq_len: int
) -> dict[str, str]:
    flops = step_flops(architecture, config, seq_len=seq_len)
    model = config.steps * flops.model
    hardware = config.steps * flops.hardware
    lines = {"operations": f"{model:.2e}; {hardware:.2e} with what is computed twice"}
    if peak := peak_flops(plan_device(config.plan_device)[0], config.peak_tflops):
        hours = model / (config.plan_ranks * peak) / 3600
        first, *others = [config.plan_utilisation] if config.plan_utilisation else USUAL
        lines["hours"] = (
            f"{hours / first:.1f} on {config.plan_ranks} x {config.plan_device}, if {100 * first:.0f} % of "
            f"{peak / 1e12:.0f} TFLOP/s are used"
            + "".join(
                f", {hours / share:.1f} if {100 * share:.0f} %" for share in others
            )
            + " (assumed)"
        )
    return lines


def _memory(
    config: TrainConfig, architecture: PretrainedConfig, seq_len: int
) -> dict[str, str]:
    memory = estimate_memory(
        architecture, config, ranks=config.plan_ranks, seq_len=seq_len, cuda=True
    )
    ranks = min(config.plan_ranks, MACHINE)
    offloaded = (
        f", {ranks * memory.host / GIB:.1f} GiB of states offloaded"
        if memory.host
        else ""
    )
    needed = ranks * max(memory.loading, memory.host)
    return {
        "ranks": f"{config.plan_ranks}, ZeRO stage {config.stage}, {'bfloat16' if config.bf16 else 'float32'}, "
        f"gradients added up in {'float32' if config.gradient_bytes == 4 else 'bfloat16'}",
        "memory per GPU": f"{_verdict(memory, config.plan_device)} (fullest in {memory.moment})",
        **{
            f"  {name}": f"{value / GIB:.1f} GiB"
            for name, value in memory.parts.items()
        },
        "memory per machine": f"{ranks * memory.loading / GIB:.1f} GiB while {ranks} ranks load the model"
        f"{offloaded}{_host_verdict(needed)}",
    }


def _verdict(memory: Memory, device: str) -> str:
    """Say whether it fits the device."""
    capacity = plan_device(device)[1] - RESERVED
    figures = f"{memory.total / GIB:.1f} of {capacity / GIB:.1f} GiB of {device}"
    if memory.total > capacity:
        return f"does not fit: {figures}"
    return (
        f"fits{', but closely' if memory.total > CLOSE * capacity else ''}: {figures}"
    )


def _host_verdict(needed: float) -> str:
    """Say whether it fits this machine, where this is one with a GPU."""
    if not torch.cuda.is_available():
        return ""
    capacity = machine_memory()
    return f"; {'fits' if needed <= capacity else 'does not fit'} the {capacity / GIB:.1f} GiB of this machine"


def _count(tokens: float) -> str:
    return f"{tokens / 1e9:.2f}B" if tokens >= 1e9 else f"{tokens / 1e6:.2f}M"


def plan_device(device: str) -> tuple[str, float]:
    """Return a device's name and bytes, of the table or a number of GiB. Raise UserError for anything else."""
    name, gib = DEVICES.get(device, ("", device))
    try:
        return name, float(gib) * GIB
    except ValueError as error:
        raise UserError(
            f"plan_device must be {', '.join(DEVICES)} or a number of GiB, got {device}"
        ) from error
