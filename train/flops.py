"""Count the floating-point operations of a training step, for model FLOPs utilization (MFU).

A product with a matrix of p parameters costs 2 p operations per row. Attention costs
4 d per layer and per pair of query and key that the layer's mask allows: scores and values,
each over d = heads x head width. A sliding window of W allows W keys at most. The backward
pass costs twice the forward pass (Kaplan et al. 2020, §2.1; Chowdhery et al. 2022, App. B).
"""

import math
import re
from typing import NamedTuple

from transformers import PretrainedConfig, PreTrainedModel

from conf.architecture import is_latent, windows
from train.config import ObjectiveConfig, TrainConfig

# Dense bfloat16 FLOP/s from the makers' datasheets, by a pattern of torch.cuda.get_device_name.
# The first pattern that matches counts.
PEAKS = {
    r"\bB200\b": 2250e12,
    r"\b(GH200|H200|H800|H100.*HBM3|H100 SXM)\b": 989e12,
    r"\bH100 NVL\b": 835e12,
    r"\bH100\b": 756e12,  # PCIe
    r"\b(A100|A800)\b": 312e12,
    r"\bL40S\b": 362e12,
    r"\bRTX 5090$": 209e12,
    r"\bRTX 4090$": 165e12,
    r"\b(A40|RTX A6000)\b": 150e12,
    r"\bA10\b": 125e12,
    r"\bL4\b": 121e12,
    r"\bRTX 3090$": 71e12,
    r"\bA10G\b": 70e12,
}


def peak_flops(device: str) -> float | None:
    """Return the peak operations per second of a device; None if the device is unknown."""
    for pattern, peak in PEAKS.items():
        if re.search(pattern, device):
            return peak
    return None


def step_flops(lm: PreTrainedModel, config: TrainConfig, *, seq_len: int) -> float:
    """Return the operations that one step needs over all ranks, as MFU counts them.

    `lm` is the base model without an adapter. Recomputation by activation checkpointing does
    not count. With LoRA, gradients of the frozen weights and the adapter's own operations do
    not count. With a gated adapter the trunk has no backward pass and no logits.
    """
    architecture = lm.config
    layers, head = matrix_parameters(lm)
    work = expected_work(config.objective, seq_len)
    row_cost = 2 * layers
    pair_cost = 2 * architecture.num_attention_heads * pair_width(architecture)
    products = row_cost * work.rows + 2 * head * work.predicted
    needed = (2 if config.lora.rank else 3) * products
    for window in layer_windows(architecture):
        needed += 3 * pair_cost * expected_pairs(config.objective, seq_len, window)
        if config.lora.gated:
            needed -= 2 * pair_cost * causal_pairs(seq_len, window)
    if config.lora.gated:
        needed -= row_cost * seq_len + 2 * 2 * head * seq_len
    return float(config.global_batch * needed)


def pair_width(architecture: PretrainedConfig) -> int:
    """Return the width of a head's key plus the width of its value."""
    if not is_latent(architecture):
        return 2 * head_width(architecture)
    # Latent attention: the key's part without positions, its part with positions, the value.
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return sum(getattr(architecture, name) for name in names)


class ExpectedRows(NamedTuple):
    """Average counts of the rows of one sequence's layout."""

    rows: float  # rows that pass through the layers
    predicted: float  # rows with logits


def expected_work(objective: ObjectiveConfig, n: int) -> ExpectedRows:
    """Return the average counts of an objective's layout over a sequence of n tokens.

    Document borders and control tokens, which shorten windows, are ignored.
    """
    if objective.name == "dual":
        # A position is not covered if, at each distance j, no window with a j-th token starts.
        missed = math.prod(
            1 - objective.start_rate * share for share in retained(objective)
        )
        return ExpectedRows(rows=2 * n, predicted=n + n * (1 - missed))
    if objective.name == "branch":
        branches = n * objective.start_rate * sum(retained(objective))
        return ExpectedRows(rows=n + branches, predicted=n + branches)
    return ExpectedRows(rows=n, predicted=n)


def expected_pairs(objective: ObjectiveConfig, n: int, window: int | None) -> float:
    """Return the average pairs of query and key in a layer, over a sequence of n tokens.

    `window` is the layer's sliding window; None for full attention.
    """
    causal = causal_pairs(n, window)
    if objective.name == "dual":
        return 2 * causal
    if objective.name == "branch":
        # A window starts at each position with the same probability. Its j-th token attends to
        # as many keys as the j-th token of the trunk from there.
        return causal + objective.start_rate * sum(
            share * (causal_pairs(n + j - 1, window) - causal_pairs(j - 1, window))
            for j, share in enumerate(retained(objective), start=1)
        )
    return causal


def causal_pairs(n: int, window: int | None) -> float:
    """Return the pairs of a causal mask over n tokens, with at most `window` keys each.

    With a window of 3:

        1 · · · ·
        1 1 · · ·
        1 1 1 · ·
        · 1 1 1 ·
        · · 1 1 1      12 pairs, without the window 15
    """
    w = n if window is None else min(n, window)
    return w * (w + 1) / 2 + (n - w) * w


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Return the sliding window of each layer; None for full attention."""
    by_type = windows(config)
    count = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or [*by_type] * count
    return [by_type[kind] for kind in types]


def retained(objective: ObjectiveConfig) -> list[float]:
    """Return the share of windows with a j-th token, for j = 1..L.

    Widths are uniform on 1..L (SDSAT eq. 4).
    """
    L = objective.L
    return [(L - j + 1) / L for j in range(1, L + 1)]


def head_width(config: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def matrix_parameters(lm: PreTrainedModel) -> tuple[int, int]:
    """Return the number of parameters that a token is multiplied by, in all layers and the head.

    The embedding does not count, since it is a lookup. Only the experts that a token is
    routed to count.
    """
    config = lm.config
    embeddings = (lm.get_input_embeddings(), lm.get_output_embeddings())
    excluded = {id(module.weight) for module in embeddings}
    experts = (
        getattr(config, "num_local_experts", None)
        or getattr(config, "num_experts", None)
        or 1
    )
    routed = getattr(config, "num_experts_per_tok", None) or 1
    layers = 0
    for name, parameter in lm.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in excluded:
            count = parameter.numel()
            layers += count * routed // experts if ".experts." in name else count
    return layers, lm.get_output_embeddings().weight.numel()
