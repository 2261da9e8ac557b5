"""Start a training from the adapter and previous-token head of an export, or from a mean of several.

If one training continues another, their adapters differ by the learned changes and by the
noise of the steps. The mean of their values keeps half of the noise, so it can draft better
than both (arXiv 2203.05482, 2109.01903). Adapters trained apart have other factors for the
same product B A; the product of their means is then of no use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftType
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from conf.adapter import HEAD, WEIGHTS
from conf.errors import UserError, as_user_error
from train.head import PreviousTokenHead
from train.lora import ADAPTER, PEFT, TRAINED_ROWS, adapter_weights
from train.pretrained import is_gated


@dataclass(frozen=True)
class SavedAdapter:
    """The adapter and the previous-token head in a folder that an export wrote."""

    source: str  # the setting and the folder, as in model.adapter=FOLDER
    config: LoraConfig
    tensors: dict[str, Tensor]
    head: dict[str, Tensor] | None  # None if the folder has no head
    gated: bool  # trained with lora.gated=true


def read_saved_adapters(folders: Sequence[Path]) -> list[SavedAdapter]:
    """Read the folders of model.adapter, the first one, and model.mean_with.

    Raises UserError for a damaged file and for an adapter other than LoRA.
    """
    adapters = []
    for number, folder in enumerate(folders):
        source = f"{'model.mean_with' if number else 'model.adapter'}={folder}"
        cure = ". Use an undamaged export with lora=kept."
        with as_user_error(f"{source} must be an export's adapter, got", cure):
            config = LoraConfig.from_pretrained(str(folder))
            if config.peft_type != PeftType.LORA:
                raise TypeError(f"peft_type={config.peft_type.value}")
            tensors = load_file(folder / WEIGHTS)
            head = load_file(folder / HEAD) if (folder / HEAD).is_file() else None
            # lora=uno writes adaptive.json beside the adapter's files.
            gated = is_gated(folder) or is_gated(folder.parent)
        adapters.append(SavedAdapter(source, config, tensors, head, gated))
    return adapters


@torch.no_grad()
def start_from(
    folders: Sequence[Path],
    lm: nn.Module,
    head: PreviousTokenHead | None,
    *,
    with_head: bool,
    gated: bool,
) -> None:
    """Set adapter and head, in place, to the mean over the folders that exports wrote.

    The first folder is model.adapter's, later folders are model.mean_with's. The heads of the
    folders are left out unless `with_head`. `gated` is lora.gated of this run. Raises the errors
    of `read_saved_adapters`, `begin_with` and `begin_head`, and UserError if ranks differ, if only
    some folders have a head, or if a gated adapter would apply to all tokens.
    """
    adapters = read_saved_adapters(folders)
    _check_alike(adapters, with_head=with_head)
    if adapters[0].gated and not gated:
        raise UserError(
            f"lora.gated must be true with {adapters[0].source}, an adapter of drafts only, got false. "
            "Add lora.gated=true."
        )
    weights = list(adapter_weights(lm.state_dict()).values())
    weights += head.state_dict().values() if head else ()
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    for saved in adapters:
        begin_with(lm, saved)
        if with_head:
            begin_head(head, saved)
        torch._foreach_add_(sums, [weight.float() for weight in weights])
    for weight, total in zip(weights, sums, strict=True):
        weight.copy_(total / len(adapters))


def _check_alike(adapters: Sequence[SavedAdapter], *, with_head: bool) -> None:
    first, *others = adapters
    for other in others:
        if other.config.r != first.config.r:
            raise UserError(
                f"{other.source} must have the rank {first.config.r} of model.adapter, "
                f"got {other.config.r}. Use an adapter that continues the other's training."
            )
        if with_head and (other.head is None) != (first.head is None):
            raise UserError(
                f"{other.source} must have a previous-token head if and only if "
                f"model.adapter has one, got {HEAD} in only one of them. Use another adapter."
            )


def begin_with(lm: nn.Module, adapter: SavedAdapter) -> None:
    """Initialize the adapter of `lm`, in place, with the one that `save_adapter` wrote.

    If the rank of `lm` is larger, B is padded with zeros, so that B A stays the same, and
    A keeps its random rows, so that the new columns of B learn. If `lm` has no trained
    rows (objective.mask), the saved rows are left out. Raises UserError unless the adapter
    has the model's layers and adaptive ids, at most its rank and peft's default scaling.
    """
    saved, tensors, source = adapter.config, adapter.tensors, adapter.source
    layers = [module for module in lm.modules() if isinstance(module, LoraLayer)]
    rank, scaling = layers[0].r[ADAPTER], layers[0].scaling[ADAPTER]
    for name in ("use_rslora", "alpha_pattern"):  # scaled otherwise than by alpha / r
        if value := getattr(saved, name):
            raise UserError(
                f"{source} must be scaled by lora_alpha / r, got "
                f"{name}={value}. Use an adapter that an export wrote."
            )
    if saved.r > rank:
        raise UserError(
            f"lora.rank must be at least {saved.r} with {source}, got {rank}. Raise it."
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
            f"{source} must have the layers of lora.targets and trained "
            f"rows like this run, got a difference in {min(different)}. Use the settings "
            "of the adapter's training."
        )
    if ids and ids[0] != saved.trainable_token_indices:
        raise UserError(
            f"{source} must have the adaptive ids {ids[0]} of the data, "
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
                f"{source} must be an adapter of model.path, with the "
                f"shape {expected} of {name}, got {shape}. Use the adapter's base model."
            )
        if ".lora_B." in name:
            tensor = tensor.float() * (saved.lora_alpha / saved.r / scaling)
            weight.zero_()
        weight[tuple(map(slice, shape))] = tensor.to(weight.dtype)


def begin_head(head: PreviousTokenHead | None, adapter: SavedAdapter) -> None:
    """Initialize the head, in place, with the adapter's head, if it has one.

    Raises UserError if the adapter has a head but this run does not (`head` is None), or if
    the adapter's head has another width.
    """
    if adapter.head is None:
        return
    if head is None:
        raise UserError(
            f"objective.previous_token must be true, got false: {adapter.source} "
            "has a previous-token head. Add objective.previous_token=true."
        )
    shapes = {name: weight.shape for name, weight in adapter.head.items()}
    expected = {name: weight.shape for name, weight in head.state_dict().items()}
    if shapes != expected:
        raise UserError(
            f"{adapter.source} must have a head of this model's width "
            f"{head.w2.out_features}, got another width in {HEAD}. "
            "Use an adapter of this model."
        )
    head.load_state_dict(adapter.head)
