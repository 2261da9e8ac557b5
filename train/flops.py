"""Floating-point operations of a training step, and peaks of devices, for MFU.

A product with a matrix of p parameters costs 2 p operations per row. Attention costs 4
d per query, key and layer (scores and values over d = heads x head width), for the
pairs that the causal mask leaves. The backward pass costs twice the forward (Kaplan et
al. 2020, §2.1; Chowdhery et al. 2022, App. B).
"""

import math
import re
from typing import NamedTuple

from transformers import PretrainedConfig

from conf.architecture import skeleton
from train.config import ObjectiveConfig, TrainConfig

# Dense bfloat16, from the makers' datasheets; the first pattern that matches
# torch.cuda.get_device_name.
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
    """Return the operations per second of a device; None if unknown."""
    for pattern, peak in PEAKS.items():
        if re.search(pattern, device):
            return peak
    return None


def step_flops(
    architecture: PretrainedConfig, config: TrainConfig, *, seq_len: int
) -> float:
    """Return the operations that a step needs over all ranks (MFU's count).

    Layers that activation checkpointing computes again are left out. Frozen weights
    (LoRA) need no gradient; the adapter's own operations are left out. With a gated
    adapter the trunk has no backward pass, and predicts nothing.
    """
    layers, head = matrix_parameters(architecture)
    work = expected_work(config.objective, seq_len)
    width = architecture.num_attention_heads * head_width(architecture)
    of_row = 2 * layers
    of_pair = 4 * width * architecture.num_hidden_layers
    products = of_row * work.rows + 2 * head * work.predicted
    scores = of_pair * work.pairs
    needed = (2 if config.lora.rank else 3) * products + 3 * scores
    if config.lora.gated:
        trunk_scores = of_pair * seq_len * (seq_len + 1) / 2
        needed -= of_row * seq_len + 2 * trunk_scores + 2 * 2 * head * seq_len
    return float(config.global_batch * needed)


class ExpectedRows(NamedTuple):
    """Average rows of one sequence of the shards after its layout."""

    rows: float  # through the layers
    pairs: float  # of query and key, in each layer's attention
    predicted: float  # rows whose logits are computed


def expected_work(objective: ObjectiveConfig, n: int) -> ExpectedRows:
    """Return an objective's average layout over n tokens, without documents' borders
    and control tokens.
    """
    causal = n * (n + 1) / 2
    if objective.name == "dual":
        # No window covers a position that has no start within reach, for each distance.
        missed = math.prod(
            1 - objective.start_rate * share for share in retained(objective)
        )
        return ExpectedRows(
            rows=2 * n, pairs=2 * causal, predicted=n + n * (1 - missed)
        )
    if objective.name == "branch":
        widths = retained(objective)
        starts = n * objective.start_rate
        branches = starts * sum(widths)
        # A window starts anywhere with equal chance; its j-th token sees its prefix and
        # j of the window.
        own = starts * sum(j * share for j, share in enumerate(widths, start=1))
        return ExpectedRows(
            rows=n + branches,
            pairs=causal + branches * (n - 1) / 2 + own,
            predicted=n + branches,
        )
    return ExpectedRows(rows=n, pairs=causal, predicted=n)


def retained(objective: ObjectiveConfig) -> list[float]:
    """Return the share of windows with a j-th token, j = 1..L: widths are uniform on
    1..L (eq. 4).
    """
    L = objective.L
    return [(L - j + 1) / L for j in range(1, L + 1)]


def head_width(config: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def matrix_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """Count the parameters that a row is multiplied with, in all layers and in the
    head.

    A lookup in the embedding is no product; of experts, those count that a token is
    routed to.
    """
    lm = skeleton(config)
    embeddings = (lm.get_input_embeddings(), lm.get_output_embeddings())
    apart = {id(module.weight) for module in embeddings}
    experts = (
        getattr(config, "num_local_experts", None)
        or getattr(config, "num_experts", None)
        or 1
    )
    routed = getattr(config, "num_experts_per_tok", None) or 1
    layers = 0
    for name, parameter in lm.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in apart:
            count = parameter.numel()
            layers += count * routed // experts if ".experts." in name else count
    return layers, lm.get_output_embeddings().weight.numel()
