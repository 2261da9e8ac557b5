"""Add LoRA to a model with peft; gated LoRA acts on adaptive tokens only.

Gated LoRA (arXiv 2507.11851): standard tokens are computed by the base model's weights
alone, so their outputs equal the base model's bit for bit, whatever the adapter has
learned.

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
from train.config import LoraSettings
from train.tensor_files import LazyWeights, write_safetensors

ADAPTER = "default"  # peft's default name for an adapter
TRAINED_ROWS = "trainable_tokens"  # in the names of the embedding rows that peft trains
ROUTERS = ("gate", "router")
# The layer of latent attention that computes keys and values from the cached latents of
# all tokens. A gate cannot tell there which tokens are adaptive.
EXPANDING = "kv_b_proj"
PEFT = "base_model.model."  # prefix of the Transformers model's weights in peft's files


class Gate:
    """Switch the adapter of a model off for some forward passes."""

    def __init__(self, lm: nn.Module) -> None:
        self._layers = [
            module for module in lm.modules() if isinstance(module, LoraLayer)
        ]

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Disable the adapter within the block, so that the model is the base model.

        It is enabled outside the block: layers that activation checkpointing recomputes
        in the backward pass are computed for branches.
        """
        for layer in self._layers:
            # enable_adapters(False) would freeze the weights as well.
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False


def adapt(
    lm: PreTrainedModel, config: LoraSettings, *, adaptive: Sequence[int], seed: int = 0
) -> PeftModel:
    """Freeze `lm`, add LoRA layers to it in place, and return peft's wrapper.

    The input embeddings of the adaptive ids are trained too. The head is never trained: a
    head tied to the embedding gets its own copy of the weight, since standard tokens use
    every row of it. Experts and their routers get no LoRA. Raises UserError for targets
    that do not exist or are not linear layers.
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
    # LoRA weights have the model's dtype: DeepSpeed keeps float32 masters of them.
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
    """Return peft's target_modules for all linear layers except the head.

    Return "all-linear", or a list of names for mixtures of experts (without experts and
    routers) and latent attention (without EXPANDING).
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

    Routers are the siblings of the experts that are named in ROUTERS or have no children.
    """
    names: set[str] = set()
    for block, experts in expert_blocks(lm).items():
        for child, module in lm.get_submodule(block).named_children():
            if child in (*experts, *ROUTERS) or not [*module.children()]:
                inner = [*module.named_modules(), *module.named_parameters()]
                names |= {f"{block}.{child}.{name}".rstrip(".") for name, _ in inner}
    return names


def _is_expert_word(lm: PreTrainedModel, target: str) -> bool:
    """Return whether peft treats the last part of a name as the name of experts' weights.

    peft then renames the layers and changes their rank, also in shared experts and dense
    layers of that name.
    """
    word = target.rpartition(".")[2]
    config = LoraConfig(target_modules=[word])
    try:
        convert_peft_config_for_transformers(config, lm, None)
    except ValueError:  # one of two names that peft requires together
        return True
    return word not in (config.target_modules or ())


def _check_targets(lm: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise TypeError for a target that LoRA cannot adapt, such as an expert or the head."""
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
    """Raise UserError if LoRA adapts layers that decoding does not support, as in GPT-2."""
    for module in lm.modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        if not isinstance(base, nn.Linear):
            raise UserError(
                f"lora.rank must be 0 for {lm.config.model_type}, since its layers are "
                f"{type(base).__name__} instead of linear layers, got {config.rank}. "
                "Train all weights."
            )


def _with_layers(lm: PreTrainedModel, settings: Any) -> PeftModel:
    # peft reads a deprecated attribute of Transformers.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted: PeftModel
        adapted = get_peft_model(lm, settings, autocast_adapter_dtype=False)
    return adapted


class PlainWeights(LazyWeights):
    """The weights of the plain model in `dtype`, computed from an adapted model's on access.

    With `merged` they contain the adapter, merged in float32 by peft's layer; otherwise
    they are the base model's. `lm` is the plain model on the meta device; LoRA is added to
    it in place.
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
        """Return the adapter's weights, named as in peft's files."""
        own = {
            f"{PEFT}{name}": tensor
            for name, tensor in adapter_weights(self._weights).items()
        }
        adapter = get_peft_model_state_dict(
            self._adapted, own, save_embedding_layers=False
        )
        return {name: tensor.to(self._dtype) for name, tensor in adapter.items()}

    def short_targets(self) -> list[str] | None:
        """Return the last parts of the adapted layers' names; None if these names also match
        layers without LoRA.
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
        """Write adapter_model.safetensors and adapter_config.json in peft's format.

        `targets` replaces target_modules. `base` is the name of the base model; None means
        the model directory that contains the adapter.
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
    """Load an adapter that `save_adapter` wrote into the plain model, in place and in
    `dtype`.

    The model's own weights may be on the meta device, with hooks that load them: peft's
    loader would leave the trained embedding rows on the meta device too.
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


def adapter_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a saved adapter, without its configuration, in memory."""
    return {name: weights[name] for name in weights if _of_adapter(name)}


def _of_adapter(name: str) -> bool:
    return "lora_" in name or TRAINED_ROWS in name


def _plain(name: str) -> str:
    """Return the plain model's name of a weight of the adapted model."""
    return name.replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")
