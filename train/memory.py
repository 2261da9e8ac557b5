"""The memory that training takes, part by part, at its fullest moment: from shapes, without weights.

The engine's part is the arithmetic of ZeRO's stages (Rajbhandari et al. 2020, §3) with the buffers that
DeepSpeed's optimizers allocate (runtime/zero/stage_1_and_2.py, stage3.py, fp16/unfused_optimizer.py). What a
layer stores for its backward pass is counted on the library's own model on the meta device.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

from train.config import TrainConfig
from train.flops import expected_work, head_width
from train.lora import adapt
from train.pretrained import skeleton

GIB = 2**30
RESERVED = 1.0 * GIB  # of a GPU: CUDA's context and the workspaces of its libraries
COUNTED = "counted"  # the name of the attention whose stored tensors are counted
# DeepSpeed's defaults, in elements
BUCKET = 500_000_000  # reduce_bucket_size
LIVE = 1_000_000_000  # stage3_max_live_parameters
PREFETCH = 50_000_000  # stage3_prefetch_bucket_size
SUB_GROUP = 1_000_000_000  # sub_group_size


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
    host: float  # offloaded to the machine
    loading: float  # of the machine while the model loads

    @property
    def total(self) -> float:
        """Bytes of the device."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The device's parts by name."""
        return {name: value for name, value in vars(self).items() if name not in ("moment", "host", "loading")}


def estimate_memory(
    architecture: PretrainedConfig, config: TrainConfig, *, ranks: int, seq_len: int, cuda: bool
) -> Memory:
    """Return the fullest moment of a rank's step, after the first, when the optimizer's moments exist."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    states = _states(architecture, config, b=dtype.itemsize, ranks=ranks, cuda=cuda)
    stored, working, logits, scratch = _forward_bytes(
        architecture, config, dtype=dtype, seq_len=seq_len, cuda=cuda
    )
    moments = {
        "the loss": (states.while_forward(), stored, logits + scratch),
        "the backward pass": (states.while_backward(), stored + working, logits),
        "the reduction of gradients": (states.at_reduction(), 0, 0),
        "the optimizer's step": (states.at_step(), 0, 0),
    }
    return max(
        (
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
        ),
        key=lambda memory: memory.total,
    )


@dataclass(frozen=True)
class States:
    """What DeepSpeed holds of a model, whatever the batch. A moment is bytes of (gradients, buffers)."""

    parameters: int
    trained: int  # of them, and of LoRA's
    largest_group: int  # of those that the optimizer steps at once: embeddings are a group of their own
    ranks: int
    stage: int
    b: int  # bytes of a weight, and of a gradient of one micro-batch
    g: int  # bytes of a gradient that several are summed in; above b only at stages 2 and 3
    accumulates: bool
    zero: dict[str, Any]
    cuda: bool  # where memory counts when it is allocated, not when it is first written to

    def _offloads(self, part: str) -> bool:
        return (self.zero.get(f"offload_{part}") or {}).get("device", "none") != "none"

    @property
    def share(self) -> float:
        """Trained parameters of this rank's partition."""
        return self.trained / self.ranks

    @property
    def weights(self) -> float:
        """Bytes of the weights that compute."""
        if self.stage < 3:
            return self.parameters * self.b
        return 0 if self._offloads("param") else self.parameters / self.ranks * self.b

    @property
    def optimizer(self) -> float:
        """Bytes of two moments and a float32 master; without ZeRO a float32 model is its own master."""
        if self.stage == 0:
            return self.trained * (12 if self.b == 2 else 8)
        return 0 if self._offloads("optimizer") else self.share * 12

    @property
    def host(self) -> float:
        """Bytes offloaded: masters, moments, a float32 gradient, the 16-bit copy on its way back; weights."""
        wide = self.g - self.b if self.stage == 3 else 0  # at stage 2 the sum stays on the device
        states = self.share * (16 + self.b + wide) if self._offloads("optimizer") else 0
        weights = self.parameters / self.ranks * self.b if self.stage == 3 and self._offloads("param") else 0
        return states + weights

    @property
    def bucket(self) -> float:
        """Elements of the buffer that gradients are reduced in."""
        return float(self.zero.get("reduce_bucket_size", BUCKET))

    @property
    def filled(self) -> float:
        """How many of them are written at most."""
        return min(self.trained, self.bucket)

    @property
    def bucket_bytes(self) -> float:
        """Bytes of the buffer; two where reduction overlaps with the backward pass (stages 1, 2)."""
        size = self.bucket if self.cuda else self.filled
        return size * self.b * (2 if self.stage < 3 and self.zero.get("overlap_comm") else 1)

    def while_forward(self) -> tuple[float, float]:
        """Return what lies beside all activations, before the backward pass."""
        offloaded = self._offloads("optimizer")
        if self.stage == 3:
            # Whole layers that are in use or prefetched; all of a model that is small enough.
            live = self.zero.get("stage3_max_live_parameters", LIVE)
            ahead = self.zero.get("stage3_prefetch_bucket_size", PREFETCH)
            layers = self.b * min(self.parameters, float(live) + float(ahead))
            return (0 if offloaded else self.share * self.g), self.bucket_bytes + layers
        if not self.accumulates:
            return 0, 0
        if self.stage == 2:
            return (0 if offloaded and self.g == self.b else self.share * self.g), 0
        return self.b * self.trained, 0

    def while_backward(self) -> tuple[float, float]:
        """Return the same with the buffers of reduction, in full where they fill before the pass ends."""
        gradients, buffers = self.while_forward()
        if self.stage == 0:
            return gradients, buffers
        if self.stage < 3 and self.cuda:
            buffers += self.bucket_bytes
        if self.stage >= 2 and self.bucket < self.trained:
            buffers += self.filled * self.b
            if self.stage == 2 and self.g > self.b:
                gradients = self.share * self.g  # one vector, which every micro-batch is added to
            elif self.stage == 2 and not self._offloads("optimizer"):
                gradients += self.share * self.b
        return gradients, buffers

    def at_reduction(self) -> tuple[float, float]:
        """Return what there is at the last gradient: the bucket, and a copy that is summed over ranks."""
        copied = self.filled * self.b
        if self.stage == 0:
            return self.trained * self.b, min(self.trained, BUCKET) * self.b
        gradients, buffers = self.while_forward()
        moved = self.share * self.b if self.bucket < self.trained else 0
        if self.stage == 1:
            return (self.trained - self.filled) * self.b + moved, self.bucket_bytes + copied
        if self.stage == 2 and self.g > self.b:
            return self.share * self.g, self.bucket_bytes + copied
        if self.stage == 2:
            return gradients + moved, self.bucket_bytes + copied
        widened = self.filled / self.ranks * self.g if self.g > self.b else 0
        return gradients, buffers + copied + widened

    def at_step(self) -> tuple[float, float]:
        """Return the optimizer's step: gradients again, flat and in float32, group by group."""
        wide = 4 if self.g == 2 else 0  # a float32 gradient needs no copy in float32
        if self.stage == 0:
            return self.trained * self.b, self.trained * wide
        if self._offloads("optimizer"):
            return (self.share * self.g if self.stage == 2 and self.g > self.b else 0), 0
        share = self.largest_group / self.ranks
        if self.stage == 3:
            share = min(share, float(self.zero.get("sub_group_size", SUB_GROUP)))
            return self.share * self.g, self.bucket_bytes + share * (self.g + wide)
        if self.g > self.b:
            return self.share * self.g, 0
        return self.share * self.b, share * (self.b + wide)


def _states(architecture: PretrainedConfig, config: TrainConfig, *, b: int, ranks: int, cuda: bool) -> States:
    """Return what the engine holds of this model, whose weights have `b` bytes."""
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
    """Return what the layers store until their backward pass; what one layer's needs besides; the gradients
    that the loss makes of its hidden states and of the head; and what it needs only while it runs.
    """
    work, batch, size = expected_work(config.objective, seq_len), config.micro_batch, dtype.itemsize
    rows, copies = batch * work.rows, 2 if config.objective.name == "dual" else 1
    branches = round(work.rows - copies * seq_len)
    layer, rest = (
        batch * copies * stored
        for stored in saved_bytes(
            architecture,
            attention=config.model.attention,
            dtype=dtype,
            trunk=0 if config.lora.gated else seq_len,
            branches=branches,
            cuda=cuda,
        )
    )
    layers = architecture.num_hidden_layers
    if config.lora.gated:
        # The trunk stores only keys and values, and each layer a copy of them before the branches'.
        kv_heads = getattr(architecture, "num_key_value_heads", None) or architecture.num_attention_heads
        keys = batch * 2 * seq_len * kv_heads * head_width(architecture) * size
        layer, rest = layer + keys, rest + layers * keys
        rows -= batch * seq_len
    if cuda and config.objective.attention == "dense":
        # Bool once, and in the scores' type in every layer.
        mask = batch * branches * (seq_len + branches)
        layer, rest = layer + mask * size, rest + mask
    d, vocab = architecture.hidden_size, architecture.vocab_size
    stream = rows * d * size  # the hidden states of all rows
    checkpointing = config.model.activation_checkpointing
    stored = rest + layers * (stream if checkpointing else layer)
    # The gradients of a layer's gated middle, and the layer itself again.
    middle = rows * getattr(architecture, "intermediate_size", 4 * d) * size
    working = 2 * middle + (layer if checkpointing else 0)
    # Logits of a chunk and of the one before, in float32 and in the model's type; soft targets have their own.
    each = (4 + (size if size < 4 else 0)) * (2 if config.objective.soft else 1)
    chunk = 2 * each * min(config.loss_chunk, batch * work.predicted) * vocab
    of_head = 0 if config.lora.rank else vocab * d
    # A bfloat16 head's gradient is summed over chunks in float32, beside a chunk's product.
    summed = 4 * of_head if size < 4 else 0
    return stored, working, stream + of_head * size, stream + chunk + summed


def saved_bytes(
    architecture: PretrainedConfig,
    *,
    attention: str,
    dtype: torch.dtype,
    trunk: int,
    branches: int = 0,
    cuda: bool = False,
) -> tuple[float, float]:
    """Return what autograd stores of one decoder layer, and of all that is no layer, for one row.

    `eager` stores the trunk's scores, and a CPU those of the branches; other kernels store inputs and outputs.
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
    """Attend as far as shapes go: (1, c, heads, d)."""
    if scores:
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        output = torch.softmax((query * 0.5) @ key.transpose(2, 3), dim=-1) @ value
    else:
        output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    return output.transpose(1, 2)


def _saved(architecture: PretrainedConfig, layers: int, dtype: torch.dtype, n: int) -> int:
    """Return the bytes that autograd stores in a forward of n columns, beside the weights."""
    config = copy.deepcopy(architecture)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, attn_implementation=COUNTED).to(dtype)
        weights = {parameter.untyped_storage()._cdata for parameter in lm.parameters()}
        stored: dict[int, Any] = {}

        def store(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                stored[storage._cdata] = storage
            return tensor

        ids = torch.zeros(1, n, dtype=torch.long)
        mask = torch.ones(1, 1, 1, n, dtype=torch.bool)  # the library leaves a mask of four axes alone
        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
            lm.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in stored.values())
