"""Start a training from the adapter and previous-token head of an export, or from a mean of several.

If one training continues another, their adapters differ by the learned changes and by the
noise of the steps. The mean of their values keeps half of the noise, so it can draft better
than both (arXiv 2203.05482, 2109.01903). Adapters trained apart have other factors for the
same product B A; the product of their means is then of no use.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import nn

from conf.adapter import HEAD
from conf.errors import UserError
from train.head import PreviousTokenHead, read_head
from train.lora import ADAPTER, PEFT, TRAINED_ROWS, adapter_weights


@torch.no_grad()
def start_from(
    folders: Sequence[Path],
    lm: nn.Module,
    head: PreviousTokenHead | None,
    *,
    with_head: bool,
) -> None:
    """Set adapter and head, in place, to the mean over the folders that exports wrote.

    The first folder is model.adapter's, later folders are model.mean_with's. The heads of the
    folders are left out unless `with_head`. Raises the errors of `begin_with` and
    `read_head`, and UserError if ranks differ or only some folders have a head.
    """
    _check_alike(folders, with_head=with_head)
    weights = list(adapter_weights(lm.state_dict()).values())
    weights += head.state_dict().values() if head else ()
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    for number, folder in enumerate(folders):
        setting = "model.mean_with" if number else "model.adapter"
        begin_with(lm, folder, setting=setting)
        if with_head:
            read_head(head, folder, setting=setting)
        torch._foreach_add_(sums, [weight.float() for weight in weights])
    for weight, total in zip(weights, sums, strict=True):
        weight.copy_(total / len(folders))


def _check_alike(folders: Sequence[Path], *, with_head: bool) -> None:
    first, *others = folders
    rank = LoraConfig.from_pretrained(str(first)).r
    for folder in others:
        if (other := LoraConfig.from_pretrained(str(folder)).r) != rank:
            raise UserError(
                f"model.mean_with={folder} must have the rank {rank} of model.adapter, "
                f"got {other}. Use an adapter that continues the other's training."
            )
        heads = {(path / HEAD).is_file() for path in (first, folder)}
        if with_head and len(heads) > 1:
            raise UserError(
                f"model.mean_with={folder} must have a previous-token head if and only if "
                f"model.adapter has one, got {HEAD} in only one of them. Use another adapter."
            )


def begin_with(lm: nn.Module, folder: Path, *, setting: str = "model.adapter") -> None:
    """Initialize the adapter of `lm`, in place, with the one that `save_adapter` wrote.

    If the rank of `lm` is larger, B is padded with zeros, so that B A stays the same, and
    A keeps its random rows, so that the new columns of B learn. If `lm` has no trained
    rows (objective.mask), the saved rows are left out. Raises UserError, naming `setting`,
    unless the adapter has the model's layers and adaptive ids, at most its rank and peft's
    default scaling.
    """
    saved = LoraConfig.from_pretrained(str(folder))
    tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    layers = [module for module in lm.modules() if isinstance(module, LoraLayer)]
    rank, scaling = layers[0].r[ADAPTER], layers[0].scaling[ADAPTER]
    for name in ("use_rslora", "alpha_pattern"):  # scaled otherwise than by alpha / r
        if value := getattr(saved, name):
            raise UserError(
                f"{setting}={folder} must be scaled by lora_alpha / r, got "
                f"{name}={value}. Use an adapter that an export wrote."
            )
    if saved.r > rank:
        raise UserError(
            f"lora.rank must be at least {saved.r} with {setting}={folder}, "
            f"got {rank}. Raise it."
        )
    ids = [
        module.token_indices[ADAPTER]
        for module in lm.modules()
        if isinstance(module, TrainableTokensLayer)
    ]
    if not ids:
        tensors = {n: t for n, t in tensors.items() if TRAINED_ROWS not in n}
    weights = adapter_weights(lm.state_dict())
    names = {f"{PEFT}{name.replace(f'.{ADAPTER}', '')}": name for name in weights}
    if different := names.keys() ^ tensors.keys():
        raise UserError(
            f"{setting}={folder} must have the layers of lora.targets and trained "
            f"rows like this run, got a difference in {min(different)}. Use the settings "
            "of the adapter's training."
        )
    if ids and ids[0] != saved.trainable_token_indices:
        raise UserError(
            f"{setting}={folder} must have the adaptive ids {ids[0]} of the data, "
            f"got {saved.trainable_token_indices}. Prepare the data with the adapter's tokenizer "
            "and vocab."
        )
    for name, tensor in tensors.items():
        weight, shape = weights[names[name]], list(tensor.shape)
        expected = list(weight.shape)
        if ".lora_" in name:
            expected[".lora_B." in name] = saved.r
        if shape != expected:
            raise UserError(
                f"{setting}={folder} must be an adapter of model.path, with the "
                f"shape {expected} of {name}, got {shape}. Use the adapter's base model."
            )
        if ".lora_B." in name:
            tensor = tensor.float() * (saved.lora_alpha / saved.r / scaling)
            weight.zero_()
        weight[tuple(map(slice, shape))] = tensor.to(weight.dtype)
