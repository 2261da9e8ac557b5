"""The memory that training takes, part by part, at its fullest moment: from shapes, without weights.

The engine's part is in train/plan/states.py; what a layer keeps for its backward pass is counted on
the library's own model on the meta device.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

from train.config import TrainConfig
from train.model.families import skeleton
from train.model.lora import adapt
from train.plan.flops import expected_work, head_width
from train.plan.states import States

GIB = 2**30
RESERVED = 1.0 * GIB  # of a GPU: CUDA's context and the workspaces of its libraries
COUNTED = "counted"  # the name of the attention whose kept tensors are counted


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank on its device at `moment`, by part, and in its machine's memory."""

    moment: str
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float  # the engine's: buckets, copies, gathered layers
    host: float  # what offloading keeps beside the device
    loading: float  # and what loading the model takes there, once

    @property
    def total(self) -> float:
        """Of the device."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The device's parts by name."""
        return {name: value for name, value in vars(self).items() if name not in ("moment", "host", "loading")}


def estimate_memory(
    architecture: PretrainedConfig, config: TrainConfig, *, ranks: int, seq_len: int, cuda: bool
) -> Memory:
    """The fullest moment of a rank's training step, after the first, when the optimizer's moments exist."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    states = _states(architecture, config, b=dtype.itemsize, ranks=ranks, cuda=cuda)
    kept, working, logits, scratch = _forward_bytes(
        architecture, config, dtype=dtype, seq_len=seq_len, cuda=cuda
    )
    moments = {
        "the loss": (states.while_forward(), kept, logits + scratch),
        "the backward pass": (states.while_backward(), kept + working, logits),
        "the reduction of gradients": (states.at_reduction(), 0, 0),
        "the optimizer's step": (states.at_step(), 0, 0),
    }
    found = [
        Memory(
            moment=moment,
            weights=states.weights,
            gradients=gradients,
            optimizer=states.optimizer,
            activations=activations,
            logits=of_loss,
            buffers=buffers,
            host=states.host,
            loading=states.parameters * states.b / (ranks if states.stage == 3 else 1),
        )
        for moment, ((gradients, buffers), activations, of_loss) in moments.items()
    ]
    return max(found, key=lambda memory: memory.total)


def _states(architecture: PretrainedConfig, config: TrainConfig, *, b: int, ranks: int, cuda: bool) -> States:
    """What the engine holds of this model, whose weights have `b` bytes."""
    lm: Any = skeleton(architecture)
    parameters = sum(parameter.numel() for parameter in lm.parameters())
    embedding = lm.get_input_embeddings().weight.numel()
    trained, largest_group = parameters, max(parameters - embedding, embedding)
    if config.lora.rank:
        with torch.device("meta"):
            adapt(lm, config.lora, adaptive=range(config.objective.L if config.objective.diverse else 1))
        trained = largest_group = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    return States(
        parameters=parameters,
        trained=trained,
        largest_group=largest_group,
        ranks=ranks,
        stage=config.stage,
        b=b,
        g=config.gradient_bytes,
        accumulates=config.accumulations(ranks) > 1,
        zero=config.zero,
        cuda=cuda,
    )


def _forward_bytes(
    architecture: PretrainedConfig, config: TrainConfig, *, dtype: torch.dtype, seq_len: int, cuda: bool
) -> tuple[float, float, float, float]:
    """What the layers keep until their backward pass; what one layer's needs besides; the gradients
    that the loss makes of its hidden states and of the head; and what it needs only while it runs.
    """
    checkpointing, work = config.model.activation_checkpointing, expected_work(config.objective, seq_len)
    rows, copies = config.micro_batch * work.rows, 2 if config.objective.name == "dual" else 1
    branches = round(work.rows - copies * seq_len)
    layer, rest = (
        config.micro_batch * copies * kept
        for kept in saved_bytes(
            architecture,
            attention=config.model.attention,
            dtype=dtype,
            trunk=0 if config.lora.gated else seq_len,
            branches=branches,
            cuda=cuda,
        )
    )
    if config.lora.gated:
        # The trunk keeps keys and values alone, and each layer a copy of them before the branches'.
        kv_heads = getattr(architecture, "num_key_value_heads", None) or architecture.num_attention_heads
        keys = config.micro_batch * 2 * seq_len * kv_heads * head_width(architecture) * dtype.itemsize
        trunk_keys, layer = architecture.num_hidden_layers * keys, layer + keys
        rows -= config.micro_batch * seq_len
        rest += trunk_keys
    if cuda and config.objective.attention == "dense":
        # Bool once, and in the scores' type in every layer.
        mask = config.micro_batch * branches * (seq_len + branches)
        layer, rest = layer + mask * dtype.itemsize, rest + mask
    d, vocab = architecture.hidden_size, architecture.vocab_size
    stream = rows * d * dtype.itemsize  # the hidden states of all rows
    kept = rest + architecture.num_hidden_layers * (stream if checkpointing else layer)
    # The gradients of a layer's middle, gated, and the layer itself once more.
    middle = rows * getattr(architecture, "intermediate_size", 4 * d) * dtype.itemsize
    working = 2 * middle + (layer if checkpointing else 0)
    # Logits of a chunk and of the one before, in float32 and in the model's type; soft targets have their own.
    each = 4 + (dtype.itemsize if dtype.itemsize < 4 else 0)
    each *= 2 if config.objective.soft else 1
    chunk = 2 * each * min(config.loss_chunk, config.micro_batch * work.predicted) * vocab
    of_head = 0 if config.lora.rank else vocab * d
    # Of a bfloat16 head the gradient is summed over chunks in float32, beside a chunk's product.
    summed = 4 * of_head if dtype.itemsize < 4 else 0
    return kept, working, stream + of_head * dtype.itemsize, stream + chunk + summed


def saved_bytes(
    architecture: PretrainedConfig,
    *,
    attention: str,
    dtype: torch.dtype,
    trunk: int,
    branches: int = 0,
    cuda: bool = False,
) -> tuple[float, float]:
    """What autograd keeps of one decoder layer, and of all that is no layer, for a row of so many columns.

    `eager` keeps the trunk's scores, and a CPU those of the branches; other kernels keep inputs and outputs.
    """

    def counted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        outputs = []
        if trunk:
            first = [states[:, :, :trunk] for states in (query, key, value)]
            outputs.append(_attend(*first, scores=attention == "eager"))
        if branches:
            outputs.append(_attend(query[:, :, trunk:], key, value, scores=not cuda))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], None

    AttentionInterface.register(COUNTED, counted)
    one, two = (_saved(architecture, layers, dtype, trunk + branches) for layers in (1, 2))
    return two - one, 2 * one - two


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scores: bool) -> Tensor:
    """(1, c, heads, d): attention as far as shapes go."""
    if scores:
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        output = torch.softmax((query * 0.5) @ key.transpose(2, 3), dim=-1) @ value
    else:
        output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    return output.transpose(1, 2)


def _saved(architecture: PretrainedConfig, layers: int, dtype: torch.dtype, n: int) -> int:
    config = copy.deepcopy(architecture)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, attn_implementation=COUNTED).to(dtype)
        own = {parameter.untyped_storage()._cdata for parameter in lm.parameters()}
        held: dict[int, Any] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                held[storage._cdata] = storage
            return tensor

        ids = torch.zeros(1, n, dtype=torch.long)
        mask = torch.ones(1, 1, 1, n, dtype=torch.bool)  # a mask of four axes is left alone by the library
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            lm.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in held.values())
