"""Check whether an architecture is supported; training, export and decoding share this check.

It runs Transformers' code on the meta device and reads no weights. It cannot see numerical
differences: the decoder finds them by comparing a tree with its paths, and
tests/test_model_types.py lists the model types that were trained and decoded.
"""

import copy
import dataclasses
import json
from collections.abc import Callable
from functools import partial, wraps
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
# Types of RoPE with frequencies that depend on the longest position.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments of attention functions
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
SCALES = ("logit_scale", "logits_scaling")  # a factor and a divisor of logits
# Names of attention functions that check their arguments and compute nothing.
PROBE = "adaptive_probe"
WINDOW_PROBE = "adaptive_window_probe"
PROBE_TOKENS = 4  # tokens in the forward of a check
HEAD_ROWS = 8  # vocabulary size of the small head that checks the logits


def _once_per_config(check: Callable[..., str]) -> Callable[..., str]:
    """Remember the result of a check in this process: a check of 32 layers takes a second."""
    results: dict[Any, str] = {}

    @wraps(check)
    def remembered(config: PretrainedConfig, **given: Any) -> str:
        fields = {**config.to_dict(), "_name_or_path": ""}
        key = (type(config), json.dumps(fields, default=repr), *given.items())
        if key not in results:
            results[key] = check(config, **given)
        return results[key]

    return remembered


def why_unsupported(config: PretrainedConfig) -> str:
    """Return why trees of this architecture cannot be decoded, or "" if they can.

    The reason ends a sentence, for example "which takes more than text".
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYERS
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [value for value in (rope, *rope.values()) if isinstance(value, dict)]
    changing = {str(value.get("rope_type")) for value in ropes} & LENGTH_DEPENDENT_ROPE
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        return "which is not a decoder-only language model"
    if config.get_text_config() is not config:
        return "which takes more than text"
    if kinds:
        return f"which has layers other than attention ({', '.join(sorted(kinds))})"
    if changing:
        return f"which has RoPE that depends on the length ({', '.join(changing)})"
    return _why_other_attention(config) or _why_other_head(config)


def passes_argument(config: PretrainedConfig, name: str) -> bool:
    """Return whether a supported decoder passes an argument of this name to attention."""
    return not _why_other_attention(config, argument=name)


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return a Transformers model of this architecture on the meta device, without weights."""
    config = copy.deepcopy(config)  # building a model may change its config
    with torch.device("meta"):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False
        )
    return lm


def windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each layer type, in tokens; None for full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    return {
        kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)
    }


def layer_window(module: Any) -> int | None:
    """Return the window of an attention module's layer, in tokens; None for full attention."""
    config = module.config
    kinds = windows(config)
    if len(kinds) > 1:
        return kinds[config.layer_types[module.layer_idx]]
    return next(iter(kinds.values()))


def logit_scale(config: PretrainedConfig) -> float:
    """Return the scale factor between the head's output and the logits.

    Granite divides logits, Cohere multiplies them. Keys of config.json that are no fields of
    the architecture's configuration class are ignored.
    """
    fields = {field.name for field in dataclasses.fields(config)}
    factor, divisor = (
        value
        if name in fields and isinstance(value := getattr(config, name), (int, float))
        else 1.0
        for name in SCALES
    )
    return factor / divisor


def key_heads(config: Any) -> int:
    """Return the number of key-value heads; each serves a group of query heads."""
    heads: int = config.num_attention_heads
    if getattr(config, "multi_query", False):
        return 1
    if is_latent(config):
        return heads
    return getattr(config, "num_key_value_heads", None) or heads


def is_latent(config: Any) -> bool:
    """Return whether a layer caches one latent vector for the keys and values of all heads."""
    return getattr(config, "kv_lora_rank", None) is not None


def head_width(config: Any) -> int:
    """Return the width of a head's keys and values."""
    width: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return width


def cache_sizes(config: Any) -> tuple[int, int, int]:
    """Return the number of heads in a layer's cache, the width of keys, and the width of values.

    Latent attention (DeepSeek-V2) caches a latent vector as the key and the rotary part of
    the key as the value.
    """
    if is_latent(config):
        return 1, config.kv_lora_rank, config.qk_rope_head_dim
    width = head_width(config)
    return key_heads(config), width, width


def attention_dropout(config: Any) -> float:
    """Return the dropout probability of attention weights in training."""
    return max(getattr(config, name, 0.0) or 0.0 for name in DROPOUTS)


def expert_blocks(lm: nn.Module) -> dict[str, list[str]]:
    """Return the mixture-of-experts modules: their names, and the children with expert weights.

    A child has expert weights if it is named "experts" or has a tensor of three dimensions.
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
    """The architecture calls attention in a way that tree attention does not support."""


def _tree_probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    argument: str | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Check the arguments of an attention call; return an empty output."""
    if argument is not None and argument not in others:
        raise _OtherAttentionError(f"which does not pass {argument} to attention")
    unsupported = [name for name in UNSUPPORTED if others.get(name) is not None]
    if unsupported:
        raise _OtherAttentionError(f"which has attention with {', '.join(unsupported)}")
    groups, rest = divmod(query.shape[1], key.shape[1])
    if rest:
        raise _OtherAttentionError(
            f"which has {query.shape[1]} heads, not a multiple of its {key.shape[1]} "
            "key-value heads"
        )
    if attention_mask is None or attention_mask.shape[2:] != (
        groups * query.shape[2],
        key.shape[2],
    ):
        raise _OtherAttentionError("which does not pass a tree's mask to attention")
    return _blank(module, query, value), None


def _blank(module: Any, query: Tensor, value: Tensor) -> Tensor:
    """Return an empty attention output, and mark the module as called."""
    module.probed = True
    b, heads, q, _ = query.shape
    return query.new_empty(b, q, heads, value.shape[3])


def _window_mask(
    *args: Any,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    **others: Any,
) -> Tensor:
    """Return an empty mask that records the window which Transformers asked for."""
    first, second = torch.tensor(0), torch.tensor(1)
    if mask_function(first, first, first, second):
        raise _OtherAttentionError("which has attention that is not causal")
    mask = torch.empty(1, 1, PROBE_TOKENS, PROBE_TOKENS, device="meta")
    mask.window = local_size  # type: ignore[attr-defined]
    return mask


def _window_probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compare the window of Transformers' mask with `layer_window`; return an empty output."""
    window, expected = getattr(attention_mask, "window", None), layer_window(module)
    if window != expected:
        raise _OtherAttentionError(
            f"which has layers with a window of {window or 'any length'}, but its "
            f"configuration has sliding_window={expected}"
        )
    if window is not None and window < 1:
        raise _OtherAttentionError(f"which has layers with a window of {window} tokens")
    return _blank(module, query, value), None


class _ProbeLayer(DynamicLayer):
    """A layer's cache that stores nothing and checks the sizes of keys and values."""

    def __init__(self, heads: int, key_width: int, value_width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._heads = heads
        self._widths = (key_width, value_width)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Check the states and return them."""
        self.is_initialized = True
        sizes = [(self._heads, width) for width in self._widths]
        given = [(t.shape[1], t.shape[3]) for t in (key_states, value_states)]
        if given != sizes:
            raise _OtherAttentionError(
                f"which caches keys and values of {given[0]} and {given[1]} heads and "
                f"widths, but its configuration says {sizes[0]} and {sizes[1]}"
            )
        return key_states, value_states


@_once_per_config
def _why_other_attention(
    config: PretrainedConfig, *, argument: str | None = None
) -> str:
    """Return why the layers' attention cannot decode a tree, or "" if it can.

    If `argument` is given, the decoder must pass it on to attention.
    """
    probe = f"{PROBE}_{argument}"
    AttentionInterface.register(probe, partial(_tree_probe, argument=argument))
    AttentionMaskInterface.register(probe, lambda *args, **kwargs: None)
    AttentionInterface.register(WINDOW_PROBE, _window_probe)
    AttentionMaskInterface.register(WINDOW_PROBE, _window_mask)
    given = {} if argument is None else {argument: None}
    return _why_failing(config, probe, **given) or _why_failing(config, WINDOW_PROBE)


def _why_failing(config: PretrainedConfig, attention: str, **given: None) -> str:
    """Return why a forward with this attention function fails, or "" if it works.

    The forward runs on the meta device, with a cache and, unless it checks windows, with a
    tree's mask. Experts return their input, since routing needs numbers.
    """
    layers: list[Any] = []
    try:
        sizes = cache_sizes(config)
        layers += [_ProbeLayer(*sizes) for _ in range(config.num_hidden_layers)]
        lm: Any = skeleton(config)
        lm.config._attn_implementation = attention
        for name, experts in expert_blocks(lm).items():
            for expert in experts:
                lm.get_submodule(f"{name}.{expert}".lstrip(".")).forward = _identity
        masks: Any = None
        if attention != WINDOW_PROBE:
            rows = config.num_attention_heads // key_heads(config) * PROBE_TOKENS
            masks = torch.zeros(1, 1, rows, PROBE_TOKENS, device="meta")
            if len(kinds := windows(config)) > 1:
                masks = dict.fromkeys(kinds, masks)
        with torch.inference_mode():
            lm.get_decoder()(
                input_ids=torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta"),
                position_ids=torch.arange(PROBE_TOKENS, device="meta")[None],
                attention_mask=masks,
                past_key_values=Cache(layers=layers),
                use_cache=True,
                **given,
            )
    except _OtherAttentionError as error:
        return str(error)
    except (
        NotImplementedError
    ):  # an operation needs numbers: the meta device has no data
        pass
    except Exception as error:  # an architecture's code may raise any exception
        return f"which fails on a tree ({type(error).__name__}: {in_one_line(error)})"
    if not any(layer.is_initialized for layer in layers):
        return "which has attention that does not use Transformers' cache"
    if not any(hasattr(module, "probed") for module in lm.modules()):
        return "which does not call one of Transformers' attention functions"
    return ""


def _identity(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return states


class _Output(MoeModelOutputWithPast):
    """A decoder's output with every field that a head may read."""

    cross_attentions = None


@_once_per_config
def _why_other_head(config: PretrainedConfig) -> str:
    """Return why the logits are not the scaled output of the head, or "" if they are.

    Transformers' own forward runs with a small head on random hidden states, and its logits
    are compared with the head's product: another scale or a cap changes them.
    """
    try:
        lm: Any = skeleton(config)
        head: nn.Linear = lm.get_output_embeddings()
        with torch.random.fork_rng(devices=[]):  # the caller's draws stay the same
            small = nn.Linear(head.in_features, HEAD_ROWS, bias=head.bias is not None)
            hidden = torch.randn(1, 2, head.in_features)
        lm.set_output_embeddings(small)
        output = _Output(last_hidden_state=hidden)
        lm.get_decoder().forward = lambda *args, **kwargs: output
        with torch.no_grad():
            logits = lm(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits
            expected = small(hidden * logit_scale(config))
            same = torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
    except Exception:  # an architecture's code may raise any exception
        same = False
    return (
        ""
        if same
        else "which has logits that are not its head applied to the last hidden states"
    )
