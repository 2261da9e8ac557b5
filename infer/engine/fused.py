"""The decoder of Llama, Mistral and Qwen2 in fewer operations, on a CPU.

On a CPU the operations of a small model take a few microseconds each. The library's layer
has about 45 operations besides its matrix products. This layer has 20, on the same modules:

    h = h + Wo attention( rotate( [Wq|Wk|Wv] norm(h) ) )      q and k rotated together
    h = h + Wd( silu(g) * u ),   [g|u] = [Wg|Wu] norm(h)

In float32 the result equals the library's bit for bit. With int8 (rounded.py) and without a C
compiler (native.py), a row does not depend on the rows beside it: rotation and attention
compute in float64 and round once, and the norm is a faster one (`RowNorm`).

Shapes: (B, q, ...) for q rows of B sequences, H query heads and K key heads of width w.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.architecture import head_width
from conf.devices.native import LANES
from infer.engine.attention import ProbeGate, attend, attend_wide
from infer.engine.cache import TreeCache
from infer.engine.gate import with_gate
from infer.engine.packed import Product

#: The library's decoders that have layers of the form above, by the model's type.
DECODERS = {"llama": "LlamaModel", "mistral": "MistralModel", "qwen2": "Qwen2Model"}
#: Rotations are computed for this number of positions at once.
BLOCK = 1024
#: PyTorch divides tensors of more elements among threads, possibly within a row. Then the
#: last bit of a function such as exp may depend on the number of rows.
UNDIVIDED = 32768


class RotaryTables(nn.Module):
    """The library's rotary embedding with tables of cosines and sines, which grow in blocks."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, q, w) of positions (B, q), in the dtype of x."""
        cos, sin = self._up_to(int(position_ids.max()), x)
        return F.embedding(position_ids, cos), F.embedding(position_ids, sin)

    def _up_to(self, position: int, x: Tensor) -> tuple[Tensor, Tensor]:
        tables = self._tables
        if tables is None or len(tables[0]) <= position or tables[0].dtype != x.dtype:
            blocks = []
            # All blocks have one size, so a position's values do not depend on the longest text.
            with torch.inference_mode(False):
                for start in range(0, position + 1, BLOCK):
                    positions = torch.arange(start, start + BLOCK, device=x.device)
                    blocks.append(self.rotary(x, positions[None]))
                cos, sin = zip(*blocks)
                tables = torch.cat(cos, 1)[0], torch.cat(sin, 1)[0]
            self._tables = tables
        return tables


#: Maps hidden states (..., d) to normed ones.
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of a decoder layer that a forward uses."""

    kind: str
    norms: tuple[Norm, Norm]
    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    scaling: float
    activation: Callable[[Tensor], Tensor]


class FusedDecoder:
    """The decoder of a model with its own gate. It changes nothing in the model.

    With `wide`, attention computes in float64, so a row does not depend on the rows beside
    it.
    """

    def __init__(
        self, decoder: Any, layers: list[Layer], gate: ProbeGate, *, wide: bool
    ) -> None:
        self._embed = with_gate(decoder.embed_tokens, gate)
        rotary = decoder.rotary_emb
        if not isinstance(rotary, RotaryTables):
            rotary = copy.deepcopy(rotary)  # its frequencies change with the positions
        self._rotary = rotary
        self._layers = layers
        self._norm = norm_of(decoder.norm, wide=wide)
        self._gate = gate
        self._wide = wide
        config = decoder.config
        self._heads: int = config.num_attention_heads
        self._key_heads: int = config.num_key_value_heads
        self._width = head_width(config)

    def __call__(
        self,
        ids_Bq: Tensor,
        positions_Bq: Tensor,
        masks: Mapping[str, Tensor | None],
        cache: TreeCache,
    ) -> Tensor:
        """Return hidden states (B, q, d).

        `masks` has the masks of tree attention by kind of layer, or one mask for all layers.
        """
        h = self._embed(ids_Bq)
        rotation = self._rotation(h, positions_Bq)
        (first, *rest) = masks.values()
        for index, layer in enumerate(self._layers):
            mask = masks[layer.kind] if rest else first
            attention_norm, mlp_norm = layer.norms
            x = attention_norm(h)
            h = h + self._attention(layer, x, rotation, mask, cache, index)
            h = h + self._mlp(layer, mlp_norm(h))
        return self._norm(h)

    def _rotation(self, h: Tensor, positions_Bq: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines (B, q, 1, w) as `rotate` needs them."""
        cos, sin = self._rotary(h, position_ids=positions_Bq)
        first, second = sin.chunk(2, -1)
        sin = torch.cat([-first, second], -1)
        if self._wide and h.dtype == torch.float32:
            cos, sin = cos.double(), sin.double()
        return cos.unsqueeze(2), sin.unsqueeze(2)

    def _attention(
        self,
        layer: Layer,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Any,
        index: int,
    ) -> Tensor:
        heads, key_heads, width = self._heads, self._key_heads, self._width
        y = layer.qkv.joint(x, self._gate)
        rotated = heads + key_heads
        qk, v = (
            y.narrow(-1, first * width, count * width).view(*y.shape[:2], count, width)
            for first, count in ((0, rotated), (rotated, key_heads))
        )
        qk = rotate(qk, *rotation).transpose(1, 2)
        query, key = qk.narrow(1, 0, heads), qk.narrow(1, heads, key_heads)
        value = v.transpose(1, 2)
        key, value = cache.layers[index].update(key, value)
        compute = attend_wide if self._wide else attend
        output = compute(query, key, value, mask, layer.scaling).transpose(1, 2)
        inner = output.to(x.dtype, memory_format=torch.contiguous_format).flatten(2)
        return layer.o.joint(inner, self._gate)[..., : x.shape[-1]]

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        y = layer.gate_up.joint(x, self._gate)
        width = layer.down.in_features
        gates, up = y.narrow(-1, 0, width), y.narrow(-1, width, width)
        inner = layer.activation(gates) * up
        return layer.down.joint(inner, self._gate)[..., : x.shape[-1]]


def activated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the activation of rows (..., w), each as it is without the rows beside it."""
    if x.numel() <= UNDIVIDED:
        return activation(x)
    rows = x.flatten(0, -2).split(max(1, UNDIVIDED // x.shape[-1]))
    return torch.cat([activation(part) for part in rows]).view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x (..., w), in the dtype of x or of `cos`.

    This is the library's x cos + [-x2, x1] sin. The first half of `sin` has its sign changed.
    """
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin)


class RowNorm:
    """RMSNorm of float32 rows (..., d) in half of the time of PyTorch's, with other last bits.

    It is h / sqrt(|h|² + d ε) times √d w. A row does not depend on the rows beside it.
    """

    def __init__(self, norm: Any) -> None:
        d = len(norm.weight)
        self.weight = norm.weight.detach() * d**0.5
        self.epsilon: float = d * norm.variance_epsilon
        # A tensor, because PyTorch would convert a Python number at each use.
        self._epsilon = torch.tensor(self.epsilon)

    def __call__(self, h: Tensor) -> Tensor:
        """Return normed rows."""
        length: Tensor = torch.linalg.vector_norm(h, 2, -1, True)
        scale = (length * length).add_(self._epsilon).rsqrt_()
        return (h * scale).mul_(self.weight)


def norm_of(norm: Any, *, wide: bool) -> Norm:
    """Return a decoder's RMSNorm: PyTorch's, or with `wide` and float32 weights a `RowNorm`."""
    if wide and norm.weight.dtype == torch.float32:
        return RowNorm(norm)
    shape = norm.weight.shape
    return lambda h: F.rms_norm(h, shape, norm.weight, norm.variance_epsilon)


def layers_of(lm: Any, *, wide: bool) -> list[Layer] | None:
    """Return the layers of a model's decoder; None for another architecture or unpacked layers."""
    decoder = lm.get_decoder()
    if type(decoder).__name__ not in DECODERS.values():
        return None
    kinds = getattr(decoder.config, "layer_types", None)
    modules = decoder.layers[: decoder.config.num_hidden_layers]
    layers = [
        fused_layer(module, kinds[index] if kinds else "", wide=wide)
        for index, module in enumerate(modules)
    ]
    complete = [layer for layer in layers if layer]
    return complete if len(complete) == len(layers) else None


def fused_layer(module: Any, kind: str, *, wide: bool) -> Layer | None:
    """Return the parts of a layer; None if its products are not packed as `Layer` needs them."""
    attention, mlp = module.self_attn, module.mlp
    products = [
        joint_product(attention.q_proj, attention.k_proj, attention.v_proj),
        joint_product(attention.o_proj),
        joint_product(mlp.gate_proj, mlp.up_proj),
        joint_product(mlp.down_proj),
    ]
    qkv, o, gate_up, down = products
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    norms = (
        norm_of(module.input_layernorm, wide=wide),
        norm_of(module.post_attention_layernorm, wide=wide),
    )
    activation = partial(activated, mlp.act_fn) if wide else mlp.act_fn
    return Layer(kind, norms, qkv, o, gate_up, down, attention.scaling, activation)


def has_operations(config: Any) -> bool:
    """Return whether native.c has the operations of a model with this configuration."""
    if config.model_type not in DECODERS or config.hidden_act not in ("silu", "swish"):
        return False
    widths = config.hidden_size, config.intermediate_size, head_width(config)
    return not any(width % LANES for width in widths)


def joint_product(*modules: nn.Module) -> Product | None:
    """Return the packed product that computes exactly these layers at once; None if it does not exist.

    It is packed again if a weight has changed. The layers may have a gated adapter.
    """
    layers: list[Any] = [getattr(module, "base", module) for module in modules]
    product: Product | None = getattr(layers[0], "product", None)
    if product is None or list(product.layers) != layers or not product.usable:
        return None
    product.refresh()
    return product


def fuse_rotary(lm: Any) -> None:
    """Replace the rotary embedding of a supported decoder (`DECODERS`) on a CPU by `RotaryTables`.

    The tables read the largest position from the device: a CUDA graph cannot be captured so.
    """
    decoder = lm.get_decoder()
    if lm.device.type != "cpu" or type(decoder).__name__ not in DECODERS.values():
        return
    rotary = decoder.rotary_emb
    if "dynamic" not in rotary.rope_type and rotary.rope_type != "longrope":
        decoder.rotary_emb = RotaryTables(rotary)
