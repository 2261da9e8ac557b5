"""The memory that training takes, part by part, at its fullest moment: from shapes, without weights.

States follow ZeRO (Rajbhandari et al. 2020, §3) as DeepSpeed allocates them; what a layer keeps
for its backward pass is counted on the library's own model on the meta device.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from train.attention import register
from train.config import TrainConfig
from train.families import skeleton
from train.flops import expected_work

GIB = 2**30
RESERVED = 1.0 * GIB  # of a GPU: CUDA's context and the workspaces of its libraries
BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size, in elements, where the settings name none
LIVE = 1_000_000_000  # its stage3_max_live_parameters
PREFETCH = 50_000_000  # its stage3_prefetch_bucket_size
SUB_GROUP = 1_000_000_000  # its sub_group_size
SHAPES_ALONE = "shapes_alone"


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


@dataclass(frozen=True)
class States:
    """What the engine holds of a model: fixed by its parameters, whatever the batch."""

    parameters: int
    embedding: int  # parameters of the embedding, which are a group of their own
    ranks: int
    stage: int
    b: int  # bytes of a weight, and of a gradient
    accumulates: bool
    zero: dict[str, Any]
    cuda: bool  # where memory counts when it is allocated, not when it is first written to

    @property
    def offloaded(self) -> bool:
        """Whether the optimizer's states are in the machine's memory."""
        return (self.zero.get("offload_optimizer") or {}).get("device", "none") != "none"

    @property
    def share(self) -> float:
        """Parameters of this rank's partition."""
        return self.parameters / self.ranks

    @property
    def weights(self) -> float:
        """Of the model that computes."""
        if self.stage < 3:
            return self.parameters * self.b
        kept_apart = (self.zero.get("offload_param") or {}).get("device", "none") != "none"
        return 0 if kept_apart else self.share * self.b

    @property
    def optimizer(self) -> float:
        """Two moments and a float32 master; only without ZeRO a float32 model is its own master."""
        if self.stage == 0:
            return self.parameters * (12 if self.b == 2 else 8)
        return 0 if self.offloaded else self.share * 12

    @property
    def host(self) -> float:
        """Masters, moments and a float32 gradient, with the 16-bit copy on its way back; weights of stage 3."""
        states = self.share * (16 + self.b) if self.offloaded else 0
        kept_apart = (self.zero.get("offload_param") or {}).get("device", "none") != "none"
        return states + (self.share * self.b if kept_apart and self.stage == 3 else 0)

    @property
    def bucket(self) -> float:
        """Elements of the buffer that gradients are reduced in."""
        return float(self.zero.get("reduce_bucket_size", BUCKET))

    @property
    def filled(self) -> float:
        """How many of them are written at most."""
        return min(self.parameters, self.bucket)

    @property
    def bucket_bytes(self) -> float:
        """Of the buffer itself; two where reduction overlaps with the backward pass (stages 1, 2)."""
        size = self.bucket if self.cuda else self.filled
        return size * self.b * (2 if self.stage < 3 and self.zero.get("overlap_comm") else 1)

    @property
    def gathered(self) -> float:
        """Stage 3: whole layers that are in use or fetched ahead; all of a model that is small enough."""
        if self.stage < 3:
            return 0
        live = float(self.zero.get("stage3_max_live_parameters", LIVE))
        ahead = float(self.zero.get("stage3_prefetch_bucket_size", PREFETCH))
        return self.b * min(self.parameters, live + ahead)

    def while_forward(self) -> tuple[float, float]:
        """Gradients and buffers that lie beside all activations, before the backward pass."""
        if self.stage == 3:
            return (0 if self.offloaded else self.share * self.b), self.bucket_bytes + self.gathered
        if not self.accumulates:
            return 0, 0
        partitioned = self.stage == 2
        if partitioned and self.offloaded:
            return 0, 0
        return self.b * (self.share if partitioned else self.parameters), 0

    def while_backward(self) -> tuple[float, float]:
        """The same with the buffers of reduction, in full where they fill before the pass ends."""
        gradients, buffers = self.while_forward()
        if self.stage == 0:
            return gradients, buffers
        if self.stage < 3 and self.cuda:
            buffers += self.bucket_bytes
        if self.stage >= 2 and self.bucket < self.parameters:
            buffers += self.filled * self.b
            gradients += self.share * self.b if self.stage == 2 and not self.offloaded else 0
        return gradients, buffers

    def at_reduction(self) -> tuple[float, float]:
        """When the last gradient is there: the bucket, and a copy of it that is summed over ranks."""
        copied = self.filled * self.b
        if self.stage == 0:
            return self.parameters * self.b, min(self.parameters, BUCKET) * self.b
        held, buffers = self.while_forward()
        if self.stage == 1:
            moved = self.share * self.b if self.bucket < self.parameters else 0
            waiting = (self.parameters - self.filled) * self.b
            return waiting + moved, self.bucket_bytes + copied
        if self.stage == 2:
            return held + (
                self.share * self.b if self.bucket < self.parameters else 0
            ), self.bucket_bytes + copied
        return held, buffers + copied

    def at_step(self) -> tuple[float, float]:
        """The optimizer's step: gradients once more, flat and in float32, of one group after the other."""
        wide = 4 if self.b == 2 else 0  # a float32 gradient needs no copy in float32
        if self.stage == 0:
            return self.parameters * self.b, self.parameters * wide
        if self.offloaded:
            return 0, 0
        share = max(self.parameters - self.embedding, self.embedding) / self.ranks
        if self.stage == 3:
            share = min(share, float(self.zero.get("sub_group_size", SUB_GROUP)))
            bucket = self.bucket_bytes
            return self.share * self.b, bucket + share * (self.b + wide)
        return self.share * self.b, share * (self.b + wide)


def estimate_memory(
    architecture: PretrainedConfig, config: TrainConfig, *, ranks: int, seq_len: int, cuda: bool
) -> Memory:
    """The fullest moment of a rank's training step, after the first, when the moments exist."""
    dtype = torch.bfloat16 if config.deepspeed.get("bf16", {}).get("enabled") else torch.float32
    lm: Any = skeleton(architecture)
    zero = config.deepspeed.get("zero_optimization", {})
    states = States(
        parameters=sum(parameter.numel() for parameter in lm.parameters()),
        embedding=lm.get_input_embeddings().weight.numel(),
        ranks=ranks,
        stage=zero.get("stage", 0),
        b=dtype.itemsize,
        accumulates=config.accumulations(ranks) > 1,
        zero=zero,
        cuda=cuda,
    )
    work = expected_work(config.objective, seq_len)
    rows = math.ceil(config.micro_batch * work.rows)
    layer, rest = saved_bytes(
        architecture, attention=config.model.attention, dtype=dtype, sequences=rows / seq_len, seq_len=seq_len
    )
    d, layers = architecture.hidden_size, architecture.num_hidden_layers
    stream = rows * d * states.b  # the hidden states of all rows
    kept = rest + layers * (stream if config.model.activation_checkpointing else layer)
    # A layer's backward pass: the gradients of its output and of its middle, and itself once more.
    working = stream + 2 * rows * getattr(architecture, "intermediate_size", 4 * d) * states.b
    working += layer if config.model.activation_checkpointing else 0
    head = lm.get_output_embeddings().weight.numel() * states.b
    predicted = min(config.loss_chunk, config.micro_batch * work.predicted)
    # A chunk's logits in float32 and one temporary of theirs; with soft targets the teachers' too.
    chunk = predicted * architecture.vocab_size * (16 if config.objective.soft else 8)
    moments = {
        "the loss": (states.while_forward(), kept + stream, stream + head + chunk),
        "the backward pass": (states.while_backward(), kept + working, head),
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
            logits=logits,
            buffers=buffers,
            host=states.host,
            loading=states.parameters * states.b,
        )
        for moment, ((gradients, buffers), activations, logits) in moments.items()
    ]
    return max(found, key=lambda memory: memory.total)


def saved_bytes(
    architecture: PretrainedConfig, *, attention: str, dtype: torch.dtype, sequences: float, seq_len: int
) -> tuple[float, float]:
    """What autograd keeps of one decoder layer, and of all that is no layer, for so many sequences.

    `eager` keeps the scores; the other kernels keep their inputs and outputs alone.
    """
    AttentionInterface.register(SHAPES_ALONE, _shapes_alone)
    name = register("eager") if attention == "eager" else SHAPES_ALONE
    one, two = (_saved(architecture, layers, name, dtype, seq_len) for layers in (1, 2))
    return (two - one) * sequences, (2 * one - two) * sequences


def _saved(architecture: PretrainedConfig, layers: int, attention: str, dtype: torch.dtype, n: int) -> int:
    config = copy.deepcopy(architecture)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
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


def _shapes_alone(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)[0]
    return output.transpose(1, 2), None
