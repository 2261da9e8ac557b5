"""Which architectures are supported: the one check of training, export and decoding.

It reads the configuration and the library's code, on the meta device, and no weights.
What shows in numbers alone is left to the decoder, which compares a tree with its paths.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Cache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf.errors import in_one_line

LAYERS = {"full_attention", "sliding_attention"}
CHANGING = {"dynamic", "longrope"}  # rotary frequencies depend on the longest position
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments of attention functions
PROBE = "adaptive_probe"  # the name of attention functions that compute nothing
ROWS = 4  # of its forward
CHECKED_ROWS = 8  # of the head that stands in for the model's own


def why_unsupported(config: PretrainedConfig) -> str:
    """Return why trees of this architecture cannot be decoded, or "".

    The reason is the end of a sentence: "which takes more than text".
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYERS
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [value for value in (rope, *rope.values()) if isinstance(value, dict)]
    changing = {str(value.get("rope_type")) for value in ropes} & CHANGING
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        return "which is not a decoder-only language model"
    if config.get_text_config() is not config:
        return "which takes more than text"
    if kinds:
        return f"which has layers other than attention ({', '.join(sorted(kinds))})"
    if changing:
        return f"whose rotary positions depend on the length ({', '.join(changing)})"
    return _why_other_attention(config) or _why_other_head(config)


def passes_argument(config: PretrainedConfig, name: str) -> bool:
    """Return whether a supported decoder hands an argument of this name to attention."""
    return not _why_other_attention(config, argument=name)


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return the library's model of this architecture on the meta device: shapes
    without weights.
    """
    config = copy.deepcopy(config)  # the model's own, which others may change
    with torch.device("meta"):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False
        )
    return lm


def windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each kind of layer; None is full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    return {
        kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)
    }


def key_heads(config: Any) -> int:
    """Return the number of heads of keys; each serves a group of query heads."""
    heads: int = config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or heads


def head_width(config: Any) -> int:
    """Return the width of a head's keys and values."""
    width: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return width


def expert_blocks(lm: nn.Module) -> dict[str, list[str]]:
    """Return the mixtures of experts: names of their modules and, of each, those of the
    children with the experts' weights.

    Experts are one tensor of three dimensions, or a list that is named so.
    """
    blocks: dict[str, list[str]] = {}
    for name, module in lm.named_modules():
        experts = [
            child_name
            for child_name, child in module.named_children()
            if child_name == "experts"
            or any(p.ndim == 3 for p in child.parameters(recurse=False))
        ]
        if experts and not (name and name.rpartition(".")[2] == "experts"):
            blocks[name] = experts
    return blocks


class _OtherAttentionError(Exception):
    """The library's code calls attention in a manner that trees do not follow."""


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    argument: str | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return an output of attention without numbers; check what attention is given."""
    if argument is not None and argument not in others:
        raise _OtherAttentionError(f"whose attention is not given {argument}")
    unsupported = [name for name in UNSUPPORTED if others.get(name) is not None]
    if unsupported:
        raise _OtherAttentionError(f"whose attention has {', '.join(unsupported)}")
    groups = query.shape[1] // key.shape[1]
    if attention_mask is None or attention_mask.shape[2:] != (
        groups * query.shape[2],
        key.shape[2],
    ):
        raise _OtherAttentionError("whose attention does not take a tree's mask")
    return query.new_empty(query.transpose(1, 2).shape), None


class _ProbeLayer(DynamicLayer):
    """A layer's cache without numbers, which checks the sizes of keys and values."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self._heads = heads
        self._width = width

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the states, a single head of them once for each head."""
        self.is_initialized = True
        for states in (key_states, value_states):
            if (
                states.shape[1] not in (1, self._heads)
                or states.shape[3] != self._width
            ):
                raise _OtherAttentionError(
                    "whose keys and values have other sizes than num_key_value_heads="
                    f"{self._heads} and head_dim={self._width}, as in latent attention"
                )
        return (
            key_states.expand(-1, self._heads, -1, -1),
            value_states.expand(-1, self._heads, -1, -1),
        )


def _why_other_attention(
    config: PretrainedConfig, *, argument: str | None = None
) -> str:
    """Return why the layers' attention is not that of a tree, or "".

    With an `argument` of the decoder, attention must be given it too. One forward on the
    meta device, with a tree's mask and a cache. Routing to experts needs numbers: each
    mixture returns its input.
    """
    probe = f"{PROBE}_{argument}"
    AttentionInterface.register(probe, partial(_probe, argument=argument))
    AttentionMaskInterface.register(probe, lambda *args, **kwargs: None)
    layers: list[Any] = []
    try:
        heads = key_heads(config)
        width = head_width(config)
        layers += [_ProbeLayer(heads, width) for _ in range(config.num_hidden_layers)]
        rows = config.num_attention_heads // heads * ROWS
        lm: Any = skeleton(config)
        lm.config._attn_implementation = probe
        for name, experts in expert_blocks(lm).items():
            for expert in experts:
                lm.get_submodule(f"{name}.{expert}".lstrip(".")).forward = _first
        mask = torch.zeros(1, 1, rows, ROWS, device="meta")
        kinds = windows(config)
        with torch.inference_mode():
            lm.get_decoder()(
                input_ids=torch.zeros(1, ROWS, dtype=torch.long, device="meta"),
                position_ids=torch.arange(ROWS, device="meta")[None],
                attention_mask=dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask,
                past_key_values=Cache(layers=layers),
                use_cache=True,
                **({} if argument is None else {argument: None}),
            )
    except _OtherAttentionError as error:
        return str(error)
    except NotImplementedError:  # a step needs numbers, which this device does not have
        pass
    except Exception as error:  # an architecture's code may raise any exception
        return f"which fails on a tree ({type(error).__name__}: {in_one_line(error)})"
    if not any(layer.is_initialized for layer in layers):
        return "whose attention does not use the library's cache"
    return ""


def _first(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return states


class _Output(MoeModelOutputWithPast):
    """A decoder's output, with all fields that heads read."""

    cross_attentions = None


def _why_other_head(config: PretrainedConfig) -> str:
    """Return why logits are not the head of the last hidden states, or "".

    The library's own forward gets a small head and random hidden states; scaling or a
    cap shows in its logits.
    """
    try:
        lm: Any = skeleton(config)
        head: nn.Linear = lm.get_output_embeddings()
        small = nn.Linear(head.in_features, CHECKED_ROWS, bias=head.bias is not None)
        hidden = torch.randn(1, 2, head.in_features)
        lm.set_output_embeddings(small)
        output = _Output(last_hidden_state=hidden)
        lm.get_decoder().forward = lambda *args, **kwargs: output
        with torch.no_grad():
            logits = lm(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits
            same = torch.allclose(logits, small(hidden), rtol=1e-4, atol=1e-5)
    except Exception:  # an architecture's code may raise any exception
        same = False
    return (
        ""
        if same
        else "whose logits are not its head applied to the last hidden states"
    )
