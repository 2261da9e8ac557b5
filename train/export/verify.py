"""Verify a written directory against its training: weights and logits.

Layers are read from the disk as they compute.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from logging import ERROR, getLogger
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import cpu_offload, init_empty_weights
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from conf.errors import UserError
from train.attention import register
from train.checkpoint import LazyWeights
from train.export.trained import Trained
from train.lora import adapt, adapter_weights, read_adapter

POSITIONS = 128  # whose logits are compared
# Allowed difference of logits after a merge, relative to the largest logit: units of the
# export's precision for rounded weights, and a share for sums in another order.
MERGE_ROUNDINGS = 16
MERGE_SUMS = 1e-4


@torch.no_grad()
def verify(out: Path, trained: Trained, dtype: torch.dtype) -> tuple[int, float]:
    """Compare the directory `out` with its training.

    Return the number of tensors, equal to the last bit, and the largest difference of logits.

    Weights must equal the training's, rounded to `dtype`, to the last bit. Logits,
    computed in float32 on both sides, must be equal too. Only with a merged adapter, which
    the training's side adds in its forward pass, may they differ by rounding.

    Raise UserError for a difference.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with TemporaryDirectory(dir=out) as offload:
        written = DirectoryWeights(out, dtype, Path(offload))
        weights = _compare_weights(written, trained.served_weights(dtype))
        lm = _read_model(out, written, device)
        if trained.keep_adapter:
            adapter = adapter_weights(trained.weights(dtype))
            weights += _compare_weights(adapter_weights(lm.state_dict()), adapter)
        text = [7919 * index % trained.vocab.text_size for index in range(POSITIONS)]
        ids = torch.tensor([[*text, *trained.manifest["adaptive"]]], device=device)
        difference = _compare_logits(lm, trained, ids, dtype)
    return weights, difference


class DirectoryWeights(LazyWeights):
    """A model directory's weights as Transformers reads them, from the disk on access."""

    def __init__(self, folder: Path, dtype: torch.dtype, offload: Path) -> None:
        logging.disable_progress_bar()
        # It warns that the weights stay on the disk.
        getLogger("accelerate").setLevel(ERROR)
        self._lm = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": "disk"},
            offload_folder=str(offload),
            local_files_only=True,
            trust_remote_code=False,
        )
        self._names = list(self._lm.state_dict())

    def __getitem__(self, name: str) -> Tensor:
        place, _, kind = name.rpartition(".")
        module = self._lm.get_submodule(place)
        with align_module_device(module):
            # A copy: the mapped file would stay in memory, and is not aligned.
            weight: Tensor = getattr(module, kind)
            return weight.detach().clone()


def _trained_model(
    trained: Trained, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return the model as it was trained, weights rounded to `dtype`, in float32."""
    weights = trained.weights(dtype)
    if not trained.lora.rank:
        return _offloaded(trained.config, weights, device)
    base = trained.plain_weights(weights, dtype, merged=False)
    lm = _offloaded(trained.config, base, device)
    adapt(lm, trained.lora, adaptive=trained.manifest["adaptive"])
    adapter = {
        name: tensor.float().to(device)
        for name, tensor in adapter_weights(weights).items()
    }
    lm.load_state_dict(adapter, strict=False, assign=True)
    lm.train(False)
    return lm


def _read_model(
    out: Path, weights: Mapping[str, Tensor], device: torch.device
) -> PreTrainedModel:
    """Return the directory's model as a server would load it, in float32."""
    config = AutoConfig.from_pretrained(
        out, local_files_only=True, trust_remote_code=False
    )
    lm = _offloaded(config, weights, device)
    if (out / "adapter").is_dir():
        read_adapter(lm, out / "adapter", dtype=torch.float32, device=device)
        lm.train(False)
    return lm


def _offloaded(
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    device: torch.device,
) -> PreTrainedModel:
    """Return a model whose layers hold their `weights` only while they compute."""
    with init_empty_weights():
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=register("sdpa"),
            trust_remote_code=False,
        )
    cpu_offload(lm, execution_device=device, state_dict=weights)
    lm.train(False)
    return lm


def _compare_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> int:
    """Return the number of tensors. Raise UserError unless they are equal.

    Some architectures are read in float32, a wider type than was written.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        weight = ours.get(name, torch.empty(0))
        trained = theirs.get(name, torch.empty(0))
        if not torch.equal(weight, trained.to(weight.device, weight.dtype)):
            raise UserError(
                f"verify: {name} must equal the training's to the last bit, "
                "got other numbers when read back. Nothing was written."
            )
    return len(ours)


def _compare_logits(
    lm: PreTrainedModel, trained: Trained, ids: Tensor, dtype: torch.dtype
) -> float:
    """Return the largest difference of logits. Raise UserError for more than rounding."""
    merged = trained.lora.rank > 0 and not trained.keep_adapter
    reference = _trained_model(trained, torch.float32 if merged else dtype, ids.device)
    theirs = _logits(reference, ids)
    difference = float((_logits(lm, ids) - theirs).abs().max())
    allowed = 0.0
    if merged:
        share = max(MERGE_ROUNDINGS * torch.finfo(dtype).eps, MERGE_SUMS)
        allowed = share * float(theirs.abs().max())
    if not difference <= allowed:  # also if it is NaN
        raise UserError(
            f"verify: logits must equal the training's within {allowed:.3g}, "
            f"got a difference of {difference:.3g} when read back. Nothing was written."
        )
    return difference


def _logits(lm: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return (n, V) logits of (1, n) ids."""
    with ExitStack() as stack:
        # peft reads the weights of head and embedding beside their forward passes.
        for module in (lm.get_output_embeddings(), lm.get_input_embeddings()):
            for part in module.modules():
                stack.enter_context(align_module_device(part))
        logits: Tensor = lm(input_ids=ids, use_cache=False).logits
        return logits[0]
