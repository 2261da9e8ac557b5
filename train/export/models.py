"""The two models that an export compares: as it was trained, and as a server would load it.

Both read their weights layer by layer whenever they compute: neither is ever held as a whole. Compares
nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from logging import ERROR, getLogger
from pathlib import Path

import torch
from accelerate import cpu_offload, init_empty_weights
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from train.attention import register
from train.export.trained import Trained
from train.lora import PlainWeights, adapt, adapter_weights, read_adapter
from train.pretrained import skeleton


class OnDisk(Mapping[str, Tensor]):
    """The weights of a model directory as the library finds them, each read when it is asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype, aside: Path) -> None:
        logging.disable_progress_bar()
        getLogger("accelerate").setLevel(ERROR)  # it warns that the weights are left on the disk
        self._lm = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": "disk"},
            offload_folder=str(aside),
            local_files_only=True,
            trust_remote_code=False,
        )
        self._names = list(self._lm.state_dict())

    def __getitem__(self, name: str) -> Tensor:
        place, _, kind = name.rpartition(".")
        module = self._lm.get_submodule(place)
        with align_module_device(module):
            # The file's own memory would stay with the process, and is not aligned as a tensor's is.
            return getattr(module, kind).detach().clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def trained_model(trained: Trained, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model as it was trained, weights rounded to `dtype`, computing in float32."""
    weights: Mapping[str, Tensor] = trained.weights(dtype)
    if not trained.lora.rank:
        return _model(trained.config, weights, torch.float32, device)
    adaptive = trained.manifest["adaptive"]
    base = PlainWeights(
        skeleton(trained.config), trained.lora, weights, adaptive=adaptive, merged=False, dtype=dtype
    )
    lm = _model(trained.config, base, torch.float32, device)
    adapt(lm, trained.lora, adaptive=adaptive)
    adapter = {name: tensor.float().to(device) for name, tensor in adapter_weights(weights).items()}
    lm.load_state_dict(adapter, strict=False, assign=True)
    return lm.eval()


def read_model(
    out: Path, read: OnDisk, trained: Trained, dtype: torch.dtype, device: torch.device, *, kept: bool
) -> PreTrainedModel:
    """The model of the directory as a server would load it, computing in `dtype`."""
    config = AutoConfig.from_pretrained(out, local_files_only=True, trust_remote_code=False)
    lm = _model(config, read, dtype, device)
    if kept:
        read_adapter(lm, out / "adapter", dtype=dtype, device=device)
    return lm.eval()


def _model(
    config: PretrainedConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    return streamed(config, weights, dtype=dtype, device=device, attention=register("sdpa"))


def streamed(
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
) -> PreTrainedModel:
    """The library's model of an architecture, whose layers ask `weights` for their own by the library's names
    whenever they compute, and hold none in between. It computes on the device in `dtype`.
    """
    with init_empty_weights():
        lm = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    cpu_offload(lm, execution_device=device, state_dict=weights)
    return lm.eval()


def resident(lm: PreTrainedModel) -> ExitStack:
    """While it lasts, head and embedding hold their weights: others read them there."""
    stack = ExitStack()
    for module in (lm.get_output_embeddings(), lm.get_input_embeddings()):
        for part in module.modules():
            stack.enter_context(align_module_device(part))
    return stack
