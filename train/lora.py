"""LoRA by peft: low-rank weights beside frozen ones; gated, they act on adaptive rows
alone.

Gated LoRA (arXiv 2507.11851): the rows of standard tokens pass the base model's own
products and nothing else, so the standard path is the base model's bit for bit,
whatever the adapter has learned.

    row            y1  y2  y3  a1  a2
    gate            0   0   0   1   1
    output of a    Wx  Wx  Wx  Wx + s·BAx  Wx + s·BAx
    linear layer
"""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.transformers_weight_conversion import (
    convert_peft_config_for_transformers,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf.architecture import expert_blocks, is_latent
from conf.errors import UserError, in_one_line
from train.adapter_layers import use_fewer_operations
from train.checkpoint import LazyWeights, write_safetensors
from train.config import LoraSettings

ADAPTER = "default"  # peft's name for the only adapter
ROUTERS = ("gate", "router")
# Of latent attention: it computes keys and values from the cache of all tokens, among
# which a gate cannot tell the adaptive ones.
EXPANDING = "kv_b_proj"
PEFT = "base_model.model."  # where peft's files have the library's model


class Gate:
    """Lets the adapter of a model act in some forwards only."""

    def __init__(self, lm: nn.Module) -> None:
        self._layers = [
            module for module in lm.modules() if isinstance(module, LoraLayer)
        ]

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Make the model the base model within the block.

        The gate is open outside of it: layers that are recomputed for their gradient
        are branches'.
        """
        for layer in self._layers:
            layer._disable_adapters = (
                True  # enable_adapters would freeze the weights too
            )
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False


def adapt(
    lm: PreTrainedModel, config: LoraSettings, *, adaptive: Sequence[int], seed: int = 0
) -> PeftModel:
    """Freeze `lm` and add peft's layers to it, in place; return peft's view of it.

    The input embeddings of the adaptive ids are trained too. The head's rows never are:
    a head that shares its weight with the embedding gets its own copy, since the
    standard path reads every row of it. Experts and their routers are left out. Raises
    UserError for targets that do not exist, or are no linear layers.
    """
    rows = list(adaptive)
    if rows and lm.get_input_embeddings().weight is lm.get_output_embeddings().weight:
        head = lm.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        lm.config.tie_word_embeddings = False
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets or default_targets(lm),
        trainable_token_indices=rows or None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    # In the model's own type: the engine keeps float32 masters of the trained weights.
    try:
        _check_targets(lm, config.targets)
        adapted = _with_layers(lm, settings)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"lora.targets={','.join(config.targets)} must be linear layers of the model, "
            f"got {in_one_line(error)}. lora.targets=[] takes all layers that can be "
            "exported and decoded."
        ) from error
    _check_layers(lm, config)
    use_fewer_operations(lm)
    return adapted


def default_targets(lm: PreTrainedModel) -> str | list[str]:
    """Return peft's word for all linear layers but the head; of a mixture of experts
    their names, without experts and routers, and of latent attention without EXPANDING.
    """
    experts = _expert_names(lm)
    latent = is_latent(lm.config)
    if not experts and not latent:
        return "all-linear"
    head = lm.get_output_embeddings()
    return [
        name
        for name, layer in lm.named_modules()
        if isinstance(layer, nn.Linear)
        and layer is not head
        and name not in experts
        and not (experts and _is_expert_word(lm, name))
        and not (latent and name.endswith(EXPANDING))
    ]


def _expert_names(lm: PreTrainedModel) -> set[str]:
    """Return the names of all modules and weights of experts and routers.

    Routers are the modules beside the experts that are named so, or have no parts.
    """
    names: set[str] = set()
    for block, experts in expert_blocks(lm).items():
        for child, module in lm.get_submodule(block).named_children():
            if child in (*experts, *ROUTERS) or not [*module.children()]:
                inner = [*module.named_modules(), *module.named_parameters()]
                names |= {f"{block}.{child}.{name}".rstrip(".") for name, _ in inner}
    return names


def _is_expert_word(lm: PreTrainedModel, target: str) -> bool:
    """Return whether peft takes the last part of a name for that of experts' weights.

    It does so wherever the name occurs, in shared experts and dense layers too, and gives
    these layers other names and ranks.
    """
    word = target.rpartition(".")[2]
    config = LoraConfig(target_modules=[word])
    try:
        convert_peft_config_for_transformers(config, lm, None)
    except ValueError:  # one of two names that peft takes together
        return True
    return word not in (config.target_modules or ())


def _check_targets(lm: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise TypeError for a target that is no linear layer, or of a mixture of experts."""
    experts = _expert_names(lm)
    head = lm.get_output_embeddings()
    for target in targets:
        end = f".{target}"
        if any(f".{name}".endswith(end) for name in experts) or (
            experts and _is_expert_word(lm, target)
        ):
            raise TypeError(f"{target}, a part of its mixture of experts")
        if is_latent(lm.config) and target.endswith(EXPANDING):
            raise TypeError(f"{target}, which computes from the cache of all tokens")
        layers = [m for name, m in lm.named_modules() if f".{name}".endswith(end)]
        if not layers:
            raise TypeError(f"{target}, which it does not have")
        if not all(isinstance(layer, nn.Linear) for layer in layers):
            raise TypeError(f"{target}, which is another kind of layer")
        if any(layer is head for layer in layers):
            raise TypeError("its head, which is not trained")


def _check_layers(lm: PreTrainedModel, config: LoraSettings) -> None:
    """Raise UserError for an adapter of layers that no decoder adapts, as GPT-2's."""
    for module in lm.modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        if not isinstance(base, nn.Linear):
            raise UserError(
                f"lora.rank must be 0 for {lm.config.model_type}, whose layers are "
                f"{type(base).__name__} in place of linear layers, got {config.rank}. "
                "Train all weights."
            )


def _with_layers(lm: PreTrainedModel, settings: Any) -> PeftModel:
    # peft reads an attribute of Transformers that warns.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted: PeftModel
        adapted = get_peft_model(lm, settings, autocast_adapter_dtype=False)
    return adapted


class PlainWeights(LazyWeights):
    """The weights of the plain model in `dtype`, each computed on access from those of
    the adapted model.

    With `merged` they contain the adapter, added in float32 by peft's own layer; else
    they are the base model's. `lm` is the plain model on the meta device, and becomes
    the adapted one.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        config: LoraSettings,
        weights: Mapping[str, Tensor],
        *,
        adaptive: Sequence[int],
        merged: bool,
        dtype: torch.dtype,
    ) -> None:
        self._lm = lm
        self._weights = weights
        self._merged = merged
        self._dtype = dtype
        self._adapted = adapt(lm, config, adaptive=adaptive)
        self._names: dict[str, str] = {
            _plain(name): name for name in lm.state_dict() if not _of_adapter(name)
        }

    def __getitem__(self, name: str) -> Tensor:
        adapted = self._names[name]
        place, inner, kind = adapted.rpartition(".base_layer.")
        if not (inner and self._merged):
            return self._weights[adapted].to(self._dtype)
        layer: Any = copy.deepcopy(self._lm.get_submodule(place))
        own = {
            key: self._weights[f"{place}.{key}"].float() for key in layer.state_dict()
        }
        layer.load_state_dict(own, assign=True)
        layer.merge()
        merged: Tensor = getattr(layer.get_base_layer(), kind)
        return merged.detach().to(self._dtype)

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapter's weights by their names in peft's files."""
        own = {
            f"{PEFT}{name}": tensor
            for name, tensor in adapter_weights(self._weights).items()
        }
        adapter = get_peft_model_state_dict(
            self._adapted, own, save_embedding_layers=False
        )
        return {name: tensor.to(self._dtype) for name, tensor in adapter.items()}

    def short_targets(self) -> list[str] | None:
        """Return the last parts of the adapted layers' names; None if further layers have
        these names.
        """
        layers = {
            name: isinstance(module, LoraLayer)
            for name, module in self._lm.named_modules()
            if isinstance(module, LoraLayer | nn.Linear) and "lora_" not in name
        }
        shorts = {name.rpartition(".")[2] for name, own in layers.items() if own}
        others = {name.rpartition(".")[2] for name, own in layers.items() if not own}
        return None if shorts & others else sorted(shorts)

    def save_adapter(
        self,
        folder: Path,
        *,
        targets: Sequence[str] | None = None,
        base: str | None = None,
    ) -> None:
        """Write the adapter as peft reads it: adapter_model.safetensors,
        adapter_config.json.

        `targets` are other names of its layers. `base` names the base model, by default
        the directory that has the adapter.
        """
        folder.mkdir(exist_ok=True)
        write_safetensors(self.adapter(), folder / SAFETENSORS_WEIGHTS_NAME)
        settings: Any = copy.copy(self._adapted.peft_config[ADAPTER])
        settings.base_model_name_or_path = base
        settings.target_modules = sorted(targets or settings.target_modules)
        settings.inference_mode = True
        settings.save_pretrained(str(folder))


def read_adapter(
    lm: PreTrainedModel, folder: Path, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Add an adapter that `save_adapter` wrote to the plain model, in place, to compute
    in `dtype`.

    The model's own weights may be on the meta device, given by hooks: peft's loader
    would leave the trained rows of the embedding there too.
    """
    _with_layers(lm, LoraConfig.from_pretrained(str(folder)))
    own = {
        name.replace(f".{ADAPTER}", ""): name
        for name in lm.state_dict()
        if _of_adapter(name)
    }
    tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    adapter = {
        own[name.removeprefix(PEFT)]: tensor.to(device, dtype)
        for name, tensor in tensors.items()
    }
    lm.load_state_dict(adapter, strict=False, assign=True)


def begin_with(lm: nn.Module, folder: Path) -> None:
    """Give an adapted model, in place, the adapter that `save_adapter` wrote to `folder`.

    To a larger rank it is padded: B with zeros, so that B A stays the same, and A with
    its random rows, so that the new columns of B learn. Raises UserError unless the
    adapter is one of this model, its layers and adaptive ids, and at most of its rank.
    """
    saved = LoraConfig.from_pretrained(str(folder))
    tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    layers = [module for module in lm.modules() if isinstance(module, LoraLayer)]
    rank, scaling = layers[0].r[ADAPTER], layers[0].scaling[ADAPTER]
    if saved.r > rank:
        raise UserError(
            f"lora.rank must be at least {saved.r} with model.adapter={folder}, "
            f"got {rank}."
        )
    weights = adapter_weights(lm.state_dict())
    names = {f"{PEFT}{name.replace(f'.{ADAPTER}', '')}": name for name in weights}
    if different := names.keys() ^ tensors.keys():
        raise UserError(
            f"model.adapter={folder} must have the layers of lora.targets and trained "
            f"rows like this run, got a difference in {min(different)}."
        )
    ids = [
        module.token_indices[ADAPTER]
        for module in lm.modules()
        if isinstance(module, TrainableTokensLayer)
    ]
    if ids and ids[0] != saved.trainable_token_indices:
        raise UserError(
            f"model.adapter={folder} must have the adaptive ids {ids[0]} of the data, "
            f"got {saved.trainable_token_indices}."
        )
    for name, tensor in tensors.items():
        weight, shape = weights[names[name]], list(tensor.shape)
        expected = list(weight.shape)
        if ".lora_" in name:
            expected[".lora_B." in name] = saved.r
        if shape != expected:
            raise UserError(
                f"model.adapter={folder} must be an adapter of model.path, with the "
                f"shape {expected} of {name}, got {shape}."
            )
        if ".lora_B." in name:
            tensor = tensor.float() * (saved.lora_alpha / saved.r / scaling)
            weight.zero_()
        weight[tuple(map(slice, shape))] = tensor.to(weight.dtype)


def adapter_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the adapter alone, read into memory."""
    return {name: weights[name] for name in weights if _of_adapter(name)}


def _of_adapter(name: str) -> bool:
    return "lora_" in name or "trainable_tokens" in name


def _plain(name: str) -> str:
    """Return the name that a weight of the adapted model has in the plain one."""
    return name.replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")
