"""The memory that training takes, part by part, at its fullest moment: from shapes, without weights.

The engine's part is the arithmetic of ZeRO's stages (Rajbhandari et al. 2020, §3) with the buffers that
DeepSpeed's optimizers allocate (runtime/zero/stage_1_and_2.py, stage3.py, fp16/unfused_optimizer.py). What a
layer stores for its backward pass is counted on the library's own model on the meta device.
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("moment", "host", "loading")
        }


def machine_memory() -> float:
    """Return the bytes of the machine, or of the control group of this process."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))


def estimate_memory(
    architecture: PretrainedConfig,
    config: TrainConfig,
    *,
    ranks: int,
    seq_len: int,
    cuda: bool,
) -> Memory:
    """Return the fullest moment of a rank's step, after the first, when the optimizer's moments exist."""
    lm: Any = skeleton(architecture)
    parameters = sum(parameter.numel() for parameter in lm.parameters())
    embedding = lm.get_input_embeddings().weight.numel()
    trained = parameters
    largest_group = max(parameters - embedding, embedding)
    if config.lora.rank:
        with torch.device("meta"):
            adapt(
                lm,
                config.lora,
                adaptive=range(config.objective.L if config.objective.diverse else 1),
            )
        trained = largest_group = sum(
            p.numel() for p in lm.parameters() if p.requires_grad
        )
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    states = engine_states(
        parameters=parameters,
        trained=trained,
        largest_group=largest_group,
        ranks=ranks,
        stage=config.stage,
        b=dtype.itemsize,
        g=config.gradient_bytes,
        accumulates=config.accumulations(ranks) > 1,
        zero=config.zero,
        cuda=cuda,
    )
    stored, working, logits, scratch = _forward_bytes(
        architecture, config, dtype=dtype, seq_len=seq_len, cuda=cuda
    )
    moments = {
        "the loss": (states.forward, stored, logits + scratch),
        "the backward pass": (states.backward, stored + working, logits),
        "the reduction of gradients": (states.reduction, 0, 0),
        "the optimizer's step": (states.step, 0, 0),
    }
    candidates = [
        Memory(
            moment=moment,
            weights=states.weights,
            gradients=gradients,
            optimizer=states.optimizer,
            activations=activations,
            logits=of_loss,
            buffers=buffers,
            host=states.host,
            loading=parameters * dtype.itemsize / (ranks if config.stage == 3 else 1),
        )
        for moment, ((gradients, buffers), activations, of_loss) in moments.items()
    ]
    return max(candidates, key=lambda memory: memory.total)


Moment = tuple[float, float]  # bytes of gradients, of buffers


class States(NamedTuple):
    """Bytes that DeepSpeed holds of a model, whatever the batch."""

    weights: float
    optimizer: float
    host: float
    forward: Moment  # beside all activations, before the backward pass
    backward: Moment  # with the buffers of reduction, in full if they fill before the pass ends
    reduction: (
        Moment  # at the last gradient: the bucket, and a copy that is summed over ranks
    )
    step: Moment  # gradients again, flat and in float32, group by group


def engine_states(
    *,
    parameters: int,
    trained: int,
    largest_group: int,
    ranks: int,
    stage: int,
    b: int,
    g: int,
    accumulates: bool,
    zero: Mapping[str, Any],
    cuda: bool,
) -> States:
    """Return what DeepSpeed holds at the settings `zero`.

    `trained` counts the parameters with those of LoRA, `largest_group` those that the optimizer steps at once
    (embeddings are a group of their own). `b` are bytes of a weight, and of a gradient of one micro-batch; `g`
    of a gradient that several are summed in, above b only at stages 2 and 3. On `cuda` memory counts when it is
    allocated, on a CPU when it is first written to.
    """
    offload, offload_weights = (
        (zero.get(f"offload_{part}") or {}).get("device", "none") != "none"
        for part in ("optimizer", "param")
    )
    share = trained / ranks
    wide = g > b
    host: float = share * (16 + b) if offload else 0
    if stage == 0:
        return undivided_states(
            parameters=parameters,
            trained=trained,
            b=b,
            g=g,
            accumulates=accumulates,
            host=host,
        )
    bucket = float(zero.get("reduce_bucket_size", BUCKET))
    fills = bucket < trained
    filled = min(trained, bucket)
    bucket_bytes = (
        (bucket if cuda else filled)
        * b
        * (2 if stage < 3 and zero.get("overlap_comm") else 1)
    )
    copied = filled * b
    partition = (
        0 if offload and (stage == 3 or not wide) else share * g
    )  # of the summed gradients
    widened = 4 if g == 2 else 0  # a float32 gradient needs no copy in float32
    group = largest_group / ranks
    weights: float = parameters * b
    forward: Moment
    backward: Moment
    step: Moment
    if stage == 1:
        forward = (b * trained if accumulates else 0, 0)
        backward = (forward[0], bucket_bytes if cuda else 0)
        reduction = (
            (trained - filled) * b + (share * b if fills else 0),
            bucket_bytes + copied,
        )
        step = (share * b, group * (b + widened))
    elif stage == 2:
        forward = (partition if accumulates else 0, 0)
        backward = (
            forward[0],
            (bucket_bytes if cuda else 0) + (copied if fills else 0),
        )
        if fills and wide:
            backward = (
                share * g,
                backward[1],
            )  # one vector, which every micro-batch is added to
        elif fills and not offload:
            backward = (forward[0] + share * b, backward[1])
        summed = share * g if wide else forward[0] + (share * b if fills else 0)
        reduction = (summed, bucket_bytes + copied)
        step = (share * g, 0) if wide else (share * b, group * (b + widened))
    else:
        # Whole layers that are in use or prefetched; all of a model that is small enough.
        live = float(zero.get("stage3_max_live_parameters", LIVE))
        ahead = float(zero.get("stage3_prefetch_bucket_size", PREFETCH))
        forward = (partition, bucket_bytes + b * min(parameters, live + ahead))
        backward = (partition, forward[1] + (copied if fills else 0))
        reduction = (
            partition,
            forward[1] + copied + (filled / ranks * g if wide else 0),
        )
        group = min(group, float(zero.get("sub_group_size", SUB_GROUP)))
        step = (share * g, bucket_bytes + group * (g + widened))
        host = (share * (16 + g) if offload else 0) + (
            parameters / ranks * b if offload_weights else 0
        )
        weights = 0 if offload_weights else parameters / ranks * b
    if offload:
        step = (share * g if stage == 2 and wide else 0, 0)
    return States(
        weights, 0 if offload else share * 12, host, forward, backward, reduction, step
    )


def undivided_states(
    *, parameters: int, trained: int, b: int, g: int, accumulates: bool, host: float
) -> States:
    """Return what DeepSpeed holds at stage 0: only there a float32 model is its own master."""
    gradients = b * trained
    before = (gradients if accumulates else 0, 0)
    return States(
        weights=parameters * b,
        optimizer=trained * (12 if b == 2 else 8),
        host=host,
        forward=before,
        backward=before,
        reduction=(gradients, min(trained, BUCKET) * b),
        step=(gradients, trained * (4 if g == 2 else 0)),
    )


def _forward_bytes(
    architecture: PretrainedConfig,
    config: TrainConfig,
    *,
    dtype: torch.dtype,
    seq_len: int,
    cuda: bool,
) -> tuple[float, float, float, float]:
    """Return what the layers store until their backward pass; what one layer's needs besides; the gradients
    that the loss makes of its hidden states and of the head; and what it needs only while it runs.
    """
    work = expected_work(config.objective, seq_len)
    batch = config.micro_batch
    size = dtype.itemsize
    rows = batch * work.rows
    copies = 2 if config.objective.name == "dual" else 1
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
        kv_heads = (
            getattr(architecture, "num_key_value_heads", None)
            or architecture.num_attention_heads
        )
        keys = batch * 2 * seq_len * kv_heads * head_width(architecture) * size
        layer = layer + keys
        rest = rest + layers * keys
        rows -= batch * seq_len
    if cuda and config.objective.attention == "dense":
        # Bool once, and in the scores' type in every layer.
        mask = batch * branches * (seq_len + branches)
        layer = layer + mask * size
        rest = rest + mask
    d = architecture.hidden_size
    vocab = architecture.vocab_size
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

    def counted(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **kwargs: Any,
    ) -> Any:
        outputs = []
        if trunk:
            first = [states[:, :, :trunk] for states in (query, key, value)]
            outputs.append(_attend(*first, scores=attention == "eager"))
        if branches:
            outputs.append(_attend(query[:, :, trunk:], key, value, scores=not cuda))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], None

    AttentionInterface.register(COUNTED, counted)
    single, two = (
        _saved(architecture, layers, dtype, trunk + branches) for layers in (1, 2)
    )
    return two - single, 2 * single - two


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scores: bool) -> Tensor:
    """Attend as far as shapes go: (1, c, heads, d)."""
    if scores:
        groups = query.shape[1] // key.shape[1]
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
        output = torch.softmax((query * 0.5) @ key.transpose(2, 3), dim=-1) @ value
    else:
        output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value
        )[0]
    return output.transpose(1, 2)


def _saved(
    architecture: PretrainedConfig, layers: int, dtype: torch.dtype, n: int
) -> int:
    """Return the bytes that autograd stores in a forward of n columns, beside the weights."""
    config = copy.deepcopy(architecture)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, attn_implementation=COUNTED).to(
            dtype
        )
        weights = {parameter.untyped_storage()._cdata for parameter in lm.parameters()}
        stored: dict[int, Any] = {}

        def store(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                stored[storage._cdata] = storage
            return tensor

        ids = torch.zeros(1, n, dtype=torch.long)
        mask = torch.ones(
            1, 1, 1, n, dtype=torch.bool
        )  # the library leaves a mask of four axes alone
        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
            lm.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in stored.values())
