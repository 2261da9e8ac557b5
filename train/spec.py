"""Check a run's model before its weights are loaded, and estimate the memory of a step."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from conf.architecture import passes_argument, skeleton
from conf.devices.memory import GIB
from conf.errors import UserError
from train.config import TrainConfig
from train.engine import check_deepspeed_settings, model_states
from train.flops import ExpectedRows, expected_work, step_flops
from train.initial_adapter import read_saved_adapters
from train.inputs import RunInputs
from train.lora import adapt
from train.pretrained import check_architecture, model_config, with_rows

RESERVED = 1.0 * GIB  # GPU memory of CUDA's context and the workspaces of its libraries
# Elements that a decoder layer stores for its backward pass, per row and per unit of
# width (hidden_size + intermediate_size). Measured with saved-tensor hooks: 6.17 on
# the shapes of CodeLlama 7B and 13B and deepseek-coder 1.3B, 5.70 on 34B (grouped
# queries), 6.15 on the demo's, all in bfloat16; 5.2 to 5.6 in float32.
STORED_PER_ROW = 6.2


@dataclass(frozen=True)
class ModelSpec:
    """The model of a run, without its weights."""

    architecture: PretrainedConfig  # of model.path or model.shape
    seq_len: int
    rows: int  # of the embedding, with the adaptive ids
    parameters: int  # of the base model with these rows
    largest: int  # parameters of the largest module
    adapted: int  # parameters with the adapter
    trained: int  # parameters that are trained
    work: ExpectedRows  # of one sequence
    flops: float  # operations of a step over all ranks


def read_spec(config: TrainConfig, inputs: RunInputs | None) -> ModelSpec:
    """Read and check the configuration of the model; count its parameters and operations.

    `inputs` is None for a plan without data.path: then the context is the sequence length.
    Raises UserError unless this model can train with these settings and can then decode, and
    for a damaged adapter.
    """
    architecture = model_config(
        config.model, vocab=inputs.vocab if inputs else None, needed=not config.plan
    )
    check_architecture(architecture, seq_len=inputs.seq_len if inputs else None)
    check_deepspeed_settings(config.deepspeed)
    if inputs:
        config.objective.adaptive_ids(inputs.vocab.adaptive)  # raises for too few
    # Only to report damaged files before the weights are loaded.
    read_saved_adapters(config.model.adapter_folders)
    mask_id = config.objective.mask_id
    if mask_id is not None and mask_id >= architecture.vocab_size:
        raise UserError(
            f"objective.mask must be an id below the model's {architecture.vocab_size:,} "
            f"rows, got {mask_id}. Lower objective.mask."
        )
    if config.lora.gated and not passes_argument(architecture, "trunk_keys"):
        raise UserError(
            "lora.gated=true needs a model that passes extra arguments to attention, "
            f"got {architecture.model_type}. Use lora.gated=false."
        )
    seq_len: int = architecture.max_position_embeddings
    grown = architecture
    if inputs:
        seq_len = inputs.seq_len
        grown = with_rows(architecture, inputs.vocab.size)
    lm = skeleton(grown)
    modules = [list(module.parameters(recurse=False)) for module in lm.modules()]
    parameters = sum(p.numel() for p in lm.parameters())
    flops = step_flops(lm, config, seq_len=seq_len)
    # The previous-token head: W1 (d, 2d) and W2 (d, d).
    head = 3 * grown.hidden_size**2 if config.objective.previous_token else 0
    if config.lora.rank:
        objective = config.objective
        with torch.device("meta"):
            ids = objective.adaptive_ids(range(objective.L))
            adapt(lm, config.lora, adaptive=ids)
    return ModelSpec(
        architecture=architecture,
        seq_len=seq_len,
        rows=grown.vocab_size,
        parameters=parameters,
        largest=max(sum(p.numel() for p in own) for own in modules),
        adapted=head + sum(p.numel() for p in lm.parameters()),
        trained=head + sum(p.numel() for p in lm.parameters() if p.requires_grad),
        work=expected_work(config.objective, seq_len),
        flops=flops,
    )


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


def estimate_memory(spec: ModelSpec, config: TrainConfig, *, ranks: int) -> Memory:
    """Return the estimated memory of a rank.

    DeepSpeed's estimators give the states; activations and loss are computed here.
    """
    states, host = model_states(
        spec.adapted, spec.trained, spec.largest, config, ranks=ranks
    )
    size = 2 if config.bf16 else 4
    rows = config.micro_batch * spec.work.rows
    trunk = config.micro_batch * spec.seq_len if config.lora.gated else 0
    rows -= trunk  # a gated adapter's trunk has no backward pass
    architecture = spec.architecture
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
    logits = spec.rows * (2 * chunk * (4 + size) + head * (4 + size))
    return Memory(
        states=states,
        activations=stored,
        loss=logits + rows * d * size,
        host=host,
        loading=spec.parameters * size / (ranks if config.stage == 3 else 1),
    )
