"""Estimate a run without its weights: memory, and for plan=true also operations and hours."""

from dataclasses import dataclass

import torch
from rich.table import Table
from transformers import PretrainedConfig, PreTrainedModel

from conf.architecture import passes_argument, skeleton
from conf.console import PlainConsole
from conf.devices.memory import GIB
from conf.errors import UserError
from conf.runs.stage import read_manifest
from data_prep.vocab import Vocab
from train.config import TrainConfig
from train.engine import RANKS_PER_MACHINE, check_deepspeed_settings, model_states
from train.flops import expected_work, peak_flops, step_flops
from train.lora import adapt
from train.pretrained import check_architecture, model_config

RESERVED = 1.0 * GIB  # GPU memory of CUDA's context and the workspaces of its libraries
# Elements that a decoder layer stores for its backward pass, per row and per unit of
# width (hidden_size + intermediate_size). Measured with saved-tensor hooks: 6.17 on
# the shapes of CodeLlama 7B and 13B and deepseek-coder 1.3B, 5.70 on 34B (grouped
# queries), 6.15 on the demo's, all in bfloat16; 5.2 to 5.6 in float32.
STORED_PER_ROW = 6.2
# For each value of plan_device, the name in torch.cuda.get_device_name and the GiB that a
# process can allocate.
DEVICES = {
    "a100_40gb": ("NVIDIA A100-SXM4-40GB", 39.4),
    "a100_80gb": ("NVIDIA A100-SXM4-80GB", 79.2),
    "h100_80gb": ("NVIDIA H100 80GB HBM3", 79.1),
    "h200_141gb": ("NVIDIA H200", 139.8),
    "l40s_48gb": ("NVIDIA L40S", 44.4),
    "rtx4090_24gb": ("NVIDIA GeForce RTX 4090", 23.6),
}
UTILISATION = 0.4  # share of a device's peak that a plan assumes


@dataclass(frozen=True)
class Memory:
    """Estimated memory of one rank, in bytes."""

    states: float  # device: weights, gradients and optimizer
    activations: float  # device
    loss: float  # device: logits of a chunk, gradients of hidden states and head
    host: float  # machine: offloaded states
    loading: float  # machine, while the model loads

    @property
    def total(self) -> float:
        """Peak memory of the device in bytes."""
        return self.states + self.activations + self.loss


def check_model(
    config: TrainConfig, architecture: PretrainedConfig, *, seq_len: int
) -> None:
    """Raise UserError unless this model can train with these settings and can then decode."""
    check_architecture(architecture, seq_len=seq_len)
    check_deepspeed_settings(config.deepspeed)
    mask_id = config.objective.mask_id
    if mask_id is not None and mask_id >= architecture.vocab_size:
        raise UserError(
            f"objective.mask must be an id below the model's {architecture.vocab_size:,} "
            f"rows, got {mask_id}."
        )
    if config.lora.rank:
        _adapt(skeleton(architecture), config)
    if config.lora.gated and not passes_argument(architecture, "trunk_keys"):
        raise UserError(
            "lora.gated=true needs a model that passes extra arguments to attention, "
            f"got {architecture.model_type}. Use lora.gated=false."
        )


def _adapt(lm: PreTrainedModel, config: TrainConfig) -> None:
    """Add the adapter to a model on the meta device."""
    objective = config.objective
    ids = objective.adaptive_ids(range(objective.L))
    with torch.device("meta"):
        adapt(lm, config.lora, adaptive=ids)


def estimate_memory(
    architecture: PretrainedConfig, config: TrainConfig, *, ranks: int, seq_len: int
) -> Memory:
    """Return the estimated memory of a rank.

    DeepSpeed's estimators give the states; activations and loss are computed here.
    """
    lm = skeleton(architecture)
    modules = [list(module.parameters(recurse=False)) for module in lm.modules()]
    largest = max(sum(p.numel() for p in parameters) for parameters in modules)
    parameters = sum(p.numel() for p in lm.parameters())
    if config.lora.rank:
        _adapt(lm, config)
    total = sum(p.numel() for p in lm.parameters())
    trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    states, host = model_states(total, trained, largest, config, ranks=ranks)
    size = 2 if config.bf16 else 4
    work = expected_work(config.objective, seq_len)
    rows = config.micro_batch * work.rows
    trunk = config.micro_batch * seq_len if config.lora.gated else 0
    rows -= trunk  # a gated adapter's trunk has no backward pass
    d = architecture.hidden_size
    width = d + getattr(architecture, "intermediate_size", 4 * d)
    layer = STORED_PER_ROW * rows * width * size
    layers = architecture.num_hidden_layers
    stored = layers * layer
    if config.model.activation_checkpointing:
        stored = layers * rows * d * size + layer
    stored += layers * 2 * trunk * d * size  # keys and values of the trunk
    chunk = min(config.loss_chunk, rows)
    head = 0 if config.lora.rank else d
    logits = architecture.vocab_size * (2 * chunk * (4 + size) + head * (4 + size))
    return Memory(
        states=states,
        activations=stored,
        loss=logits + rows * d * size,
        host=host / min(ranks, RANKS_PER_MACHINE),
        loading=parameters * size / (ranks if config.stage == 3 else 1),
    )


def print_plan(config: TrainConfig) -> None:
    """Print the plan as a table. Raises UserError for settings that cannot run."""
    if config.minutes is not None:
        raise UserError(
            f"plan=true needs a number of steps, got minutes={config.minutes:g}. "
            "Set minutes=null steps=N."
        )
    table = Table(title="training plan", show_header=False)
    for name, value in plan(config).items():
        table.add_row(name, value)
    PlainConsole().print(table)


def plan(config: TrainConfig) -> dict[str, str]:
    """Return the lines of the plan by name. Raises UserError for settings that cannot run."""
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
    check_model(config, architecture, seq_len=seq_len)
    parameters = sum(p.numel() for p in skeleton(architecture).parameters())
    step = config.global_batch * seq_len
    computed = expected_work(config.objective, seq_len).rows / seq_len
    total = config.steps * step
    lines = {
        "model": f"{architecture.model_type}, {parameters / 1e9:.2f}B parameters",
        "batch": f"{config.global_batch} sequences of {seq_len:,} = {config.plan_ranks} ranks x "
        f"{config.micro_batch} x {config.accumulations(config.plan_ranks)} accumulations",
        "tokens": f"{_count(total)} of data, {_count(computed * total)} computed",
    }
    if data:
        epochs = config.steps * config.global_batch / data["train"]["sequences"]
        tokens = _count(data["train"]["tokens"])
        lines["data"] = f"{config.data.path}: {tokens} tokens, read {epochs:.2f} times"
    return {
        **lines,
        **_cost(config, architecture, seq_len),
        **_memory(config, architecture, seq_len),
    }


def _cost(
    config: TrainConfig, architecture: PretrainedConfig, seq_len: int
) -> dict[str, str]:
    """Return the plan's lines about operations and hours."""
    flops = config.steps * step_flops(architecture, config, seq_len=seq_len)
    lines = {"operations": f"{flops:.2e}"}
    if peak := peak_flops(plan_device(config.plan_device)[0]):
        hours = flops / (UTILISATION * config.plan_ranks * peak) / 3600
        lines["hours"] = (
            f"{hours:.1f} on {config.plan_ranks} x {config.plan_device} "
            f"at {100 * UTILISATION:.0f} % of {peak / 1e12:.0f} TFLOP/s (assumed)"
        )
    return lines


def _memory(
    config: TrainConfig, architecture: PretrainedConfig, seq_len: int
) -> dict[str, str]:
    """Return the plan's lines about memory."""
    ranks = config.plan_ranks
    memory = estimate_memory(architecture, config, ranks=ranks, seq_len=seq_len)
    local = min(ranks, RANKS_PER_MACHINE)
    machine = (
        f"{local * memory.loading / GIB:.1f} GiB while {local} ranks load the model"
    )
    if memory.host:
        machine += f", {local * memory.host / GIB:.1f} GiB of states offloaded"
    return {
        "memory per GPU": _verdict(memory, config.plan_device),
        **{
            f"  {name}": f"{getattr(memory, name) / GIB:.1f} GiB"
            for name in ("states", "activations", "loss")
        },
        "memory per machine": machine,
    }


def _verdict(memory: Memory, device: str) -> str:
    """Return a text that says whether the estimate fits the device."""
    capacity = plan_device(device)[1] - RESERVED
    verdict = "fits" if memory.total <= capacity else "does not fit"
    return (
        f"{verdict}: {memory.total / GIB:.1f} of {capacity / GIB:.1f} GiB of {device}"
    )


def _count(tokens: float) -> str:
    return f"{tokens / 1e9:.2f}B" if tokens >= 1e9 else f"{tokens / 1e6:.2f}M"


def plan_device(device: str) -> tuple[str, float]:
    """Return the name and the bytes of a device: a key of DEVICES, or a number of GiB.

    The name of a number is "". Raises UserError for other text.
    """
    name, gib = DEVICES.get(device, ("", device))
    try:
        return name, float(gib) * GIB
    except ValueError as error:
        raise UserError(
            f"plan_device must be {', '.join(DEVICES)} or a number of GiB, got {device}."
        ) from error
