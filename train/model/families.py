"""Which architectures train here: causal models with rotary positions. Others are refused by name.

Knows configurations and the library's classes; needs no weights.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf import UserError

CHECKED_ROWS = 8  # of the head that stands in for the model's own


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The library's model of this architecture on the meta device: shapes without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_family(config: PretrainedConfig, *, seq_len: int) -> None:
    """Raises UserError, naming the architecture, unless its causal loss over `seq_len` tokens is ours.

    Ours takes logits from the head's weight alone, hands positions and masks to a rotary
    model, and packs documents without resetting anything between them.
    """
    reason = _not_ours(config, seq_len) or _not_its_head(config)
    if reason:
        raise UserError(
            f"model: wanted a causal model with rotary positions, found {config.model_type}{reason}"
        )
    if seq_len > config.max_position_embeddings:
        raise UserError(
            f"data.path: wanted sequences of at most {config.max_position_embeddings:,} tokens, the context of "
            f"{config.model_type}, found {seq_len:,}"
        )


def _not_ours(config: PretrainedConfig, seq_len: int) -> str:
    """What the configuration itself gives away, as the end of a sentence; empty where nothing does."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ", which is no decoder-only language model"
    if not getattr(config, "rope_parameters", None) or getattr(config, "alibi", False):
        return ", whose configuration has no rotary positions"
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    layers = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    kinds = layers - {"full_attention", "sliding_attention"}
    if kinds or model._is_stateful:
        return f", which has layers other than attention{': ' + ', '.join(sorted(kinds)) if kinds else ''}"
    if not (model._supports_attention_backend and model._supports_sdpa):
        return ", whose attention is more than the library's kernels compute"
    window = getattr(config, "sliding_window", None)
    if window and window < seq_len and "sliding_attention" in layers:
        return f", whose window sliding_window={window} is narrower than the sequences of {seq_len:,} tokens"
    return ""


def _not_its_head(config: PretrainedConfig) -> str:
    """Whether the logits are more than the head's weight times the hidden states: scaled, capped, shifted.

    Tried, not looked up: a small head and chosen hidden states in the library's own forward.
    """
    try:
        lm = skeleton(config)
        head: nn.Linear = lm.get_output_embeddings()
        small = nn.Linear(head.in_features, CHECKED_ROWS, bias=head.bias is not None)
        hidden = torch.randn(1, 2, head.in_features)
        lm.set_output_embeddings(small)
        lm.get_decoder().forward = lambda *args, **kwargs: MoeModelOutputWithPast(last_hidden_state=hidden)
        with torch.no_grad():
            logits = lm(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits
        same = torch.allclose(logits, hidden @ small.weight.T, rtol=1e-4, atol=1e-5)
    except Exception as error:  # whatever an architecture's own code raises
        return f", whose head could not be tried ({type(error).__name__}: {str(error).splitlines()[0]})"
    return "" if same else ", whose logits are not its head's weight times the last hidden states"
