"""LoRA by peft: low-rank weights beside frozen ones; gated, they act on adaptive rows alone.

Gated LoRA (arXiv 2507.11851): the rows of standard tokens pass the base model's own products and
nothing else, so the standard path is the base model's bit for bit, whatever the adapter has
learned. Knows the library's model and peft; knows no engine and no objective.

    row            y1  y2  y3  a1  a2
    gate            0   0   0   1   1
    output of a    Wx  Wx  Wx  Wx + s·BAx  Wx + s·BAx
    linear layer
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf import UserError
from train.config import LoraSettings

ADAPTER = "default"  # peft's name for the only adapter


class Gate:
    """Lets the adapter of a model act on some rows of a forward only.

    A row that is left out never reaches A, and B's output for it is zero.
    """

    def __init__(self, lm: nn.Module) -> None:
        # A compiled layer would be compiled anew for every number of adaptive rows.
        torch._dynamo.config.force_nn_module_property_static_shapes = False
        for module in lm.modules():
            if isinstance(module, LoraLayer):
                module.lora_A[ADAPTER].register_forward_pre_hook(self._gather)
                module.lora_B[ADAPTER].register_forward_hook(self._scatter)

    def open(self, rows: Tensor) -> None:
        """For the rows that are True of (r, c), until the next call: layers that are computed again
        for their gradient must find what the first pass found.
        """
        self._every, self._rows = rows, rows.flatten().nonzero()[:, 0]

    def _gather(self, module: nn.Module, args: tuple[Tensor]) -> Tensor:
        return args[0].flatten(0, 1)[self._rows]

    def _scatter(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        every = output.new_zeros(*self._every.shape, output.shape[-1])
        return every.flatten(0, 1).index_copy(0, self._rows, output).view_as(every)


def adapt(lm: PreTrainedModel, config: LoraSettings, *, adaptive: Sequence[int], seed: int = 0) -> PeftModel:
    """Freeze `lm` and put peft's layers into it, in place; returns peft's view of it.

    With `adaptive_rows` the input embeddings of the adaptive ids are trained beside them. The
    head's rows never are: a head that shares its weight with the embedding gets its own copy, since
    the standard path reads every row of it. Raises UserError for targets that are not there.
    """
    rows = list(adaptive) if config.adaptive_rows else []
    if rows and lm.get_input_embeddings().weight is lm.get_output_embeddings().weight:
        head = lm.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        lm.config.tie_word_embeddings = False
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets or "all-linear",
        trainable_token_indices=rows or None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    found = f"lora.targets={','.join(config.targets)}: wanted linear layers of the model other than its head"
    try:
        # In the model's own type: the engine keeps float32 masters of whatever is trained.
        adapted = get_peft_model(lm, settings, autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        raise UserError(f"{found}, found {str(error).splitlines()[0]}") from error
    if any(isinstance(layer, LoraLayer) for layer in (lm.get_output_embeddings(), lm.get_input_embeddings())):
        raise UserError(f"{found}, found the head or the embedding")
    return adapted


def plain_weights(
    lm: PreTrainedModel,
    config: LoraSettings,
    weights: Mapping[str, Tensor],
    *,
    adaptive: Sequence[int],
    keep: Path | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The weights of the plain model `lm`, which may be on the meta device, from those of its adapted self.

    The adapter is merged into them, in float32; or written to the folder `keep` in `dtype`, as peft
    reads it (adapter_model.safetensors, adapter_config.json), and the weights are the base model's.
    """
    adapted = adapt(lm, config, adaptive=adaptive)
    if keep is None:
        weights = {name: tensor.float() for name, tensor in weights.items()}
    lm.load_state_dict(weights, assign=True)
    if keep is None:
        return adapted.merge_and_unload().state_dict()
    adapter = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    keep.mkdir()
    written = {name: tensor.to(dtype).contiguous() for name, tensor in adapter.items()}
    save_file(written, keep / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    _portable(adapted.peft_config[ADAPTER]).save_pretrained(str(keep))
    return adapted.unload().state_dict()


def _portable(settings: Any) -> LoraConfig:
    """Settings that say the same on every machine and in every run."""
    settings.base_model_name_or_path = None  # the directory that the adapter lies in
    settings.target_modules = sorted(settings.target_modules)
    settings.inference_mode = True
    return settings
