"""plan=true: what a training run would do, without weights, data or GPU.

Parameters are counted on the library's own model on the meta device; memory per GPU is an
estimate from them, its terms stated at each line.
"""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

from train.config import TrainConfig
from train.model import model_config

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU, by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def count_parameters(config: PretrainedConfig) -> int:
    """Parameters of the library's model of this architecture."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in lm.parameters())


def estimate_memory(
    config: PretrainedConfig,
    *,
    parameters: int,
    stage: int,
    ranks: int,
    rows: int,
    seq_len: int,
    chunk: int,
    bytes_per_weight: int,
    checkpointing: bool,
) -> Memory:
    """Mixed-precision AdamW under ZeRO (Rajbhandari et al. 2020, §3) with the loss in chunks.

    Stage 1 divides the optimizer's states by `ranks`, stage 2 the gradients too, stage 3 the
    weights too. Activations, in 2-byte values per token (Korthikanti et al. 2022, §4, with
    an attention kernel that keeps no scores): d for a checkpointed layer's input, about 17 d
    for a whole Llama layer; with checkpointing one whole layer lives at a time.
    """
    tokens, d, layers = rows * seq_len, config.hidden_size, config.num_hidden_layers
    whole_layer = 17 * d * tokens * bytes_per_weight
    kept = layers * d * tokens * bytes_per_weight + whole_layer if checkpointing else layers * whole_layer
    return Memory(
        weights=parameters * bytes_per_weight / (ranks if stage >= 3 else 1),
        gradients=parameters * bytes_per_weight / (ranks if stage >= 2 else 1),
        # float32 master weight and two moments; a float32 model is its own master
        optimizer=parameters * (12 if bytes_per_weight == 2 else 8) / (ranks if stage >= 1 else 1),
        activations=kept,
        # a chunk's logits in the model's type and in float32, and the gradient of either
        logits=chunk * config.vocab_size * 2 * (bytes_per_weight + 4),
    )


def print_plan(config: TrainConfig) -> None:
    """Print model, tokens, steps, ranks, ZeRO stage and memory per GPU."""
    architecture = model_config(config.model)
    parameters = count_parameters(architecture)
    ranks = config.plan_ranks
    accumulations = config.accumulations(ranks)
    seq_len = architecture.max_position_embeddings
    copies = 2 if config.objective.name == "dual" else 1  # Y, or Y and M
    stage = config.deepspeed.get("zero_optimization", {}).get("stage", 0)
    bf16 = config.deepspeed.get("bf16", {}).get("enabled", False)
    memory = estimate_memory(
        architecture,
        parameters=parameters,
        stage=stage,
        ranks=ranks,
        rows=copies * config.micro_batch,
        seq_len=seq_len,
        chunk=config.loss_chunk,
        bytes_per_weight=2 if bf16 else 4,
        checkpointing=config.model.activation_checkpointing,
    )
    data = config.global_batch * seq_len
    objective = config.objective
    window = f", L={objective.L}, w={objective.w:g}" if objective.name != "causal" else ""
    optimizer = config.optimizer
    rows = {
        "model": f"{config.model.path or 'the shape of the settings'}: {architecture.model_type}, "
        f"{parameters / 1e9:.2f}B parameters",
        "objective": objective.name + window,
        "steps": f"{config.steps:,}, learning rate {optimizer.lr:g} to {optimizer.min_lr:g}, "
        f"warm-up {optimizer.warmup_steps}",
        "batch": f"{config.global_batch} sequences of {seq_len:,} = {ranks} ranks x {config.micro_batch} x "
        f"{accumulations} accumulations",
        "tokens per step": f"{data / 1e6:.2f}M of data, {copies * data / 1e6:.2f}M computed",
        "tokens in all": f"{config.steps * data / 1e9:.2f}B of data, "
        f"{config.steps * copies * data / 1e9:.2f}B computed",
        "operations": f"{6 * parameters * config.steps * copies * data:.2e} (6 x parameters x tokens)",
        "ranks": f"{ranks}, ZeRO stage {stage}, {'bfloat16' if bf16 else 'float32'}",
        "memory per GPU": f"about {memory.total / GIB:.1f} GiB",
        **{f"  {name}": f"{value / GIB:.1f} GiB" for name, value in vars(memory).items()},
    }
    table = Table(title="training plan", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
