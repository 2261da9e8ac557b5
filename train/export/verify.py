"""Compare the weights and logits of an exported directory with its checkpoint.

Each layer is read from disk when it computes.
"""

from collections.abc import Mapping, Sequence
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
from train.export.trained import Trained
from train.lora import adapt, adapter_weights, read_adapter
from train.tensor_files import LazyWeights

POSITIONS = 128  # the most ids of texts in the comparison of logits
# Allowed difference of logits after a merge, relative to the largest logit: a multiple of
# the export dtype's eps for rounded weights, and a floor for sums in another order.
MERGE_ROUNDINGS = 16
MERGE_SUMS = 1e-4


@torch.no_grad()
def verify(out: Path, trained: Trained, dtype: torch.dtype) -> tuple[int, float]:
    """Compare the directory `out` with its checkpoint.

    Return the number of tensors and the largest difference of logits.

    Weights must equal the checkpoint's, rounded to `dtype`, bit for bit. Logits are
    computed in float32 on both sides and must be equal too, except with a merged adapter:
    the reference applies it unmerged, so they may differ by rounding.

    Raise UserError for a larger difference.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with TemporaryDirectory(dir=out) as offload:
        written = DirectoryWeights(out, dtype, Path(offload))
        weights = _compare_weights(written, trained.served_weights(dtype))
        lm = _read_model(out, written, device)
        if trained.keep_adapter:
            adapter = adapter_weights(trained.weights(dtype))
            weights += _compare_weights(adapter_weights(lm.state_dict()), adapter)
        compared = compared_ids(
            trained.config, trained.vocab.text_size, trained.manifest["adaptive"]
        )
        ids = torch.tensor([compared], device=device)
        difference = _compare_logits(lm, trained, ids, dtype)
    return weights, difference


def compared_ids(
    config: PretrainedConfig, text_size: int, adaptive: Sequence[int]
) -> list[int]:
    """Return ids of texts, and the adaptive ids after them, that fit the context of the model."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    count = POSITIONS
    if isinstance(context, int):  # learned positions end there
        count = max(1, min(count, context - len(adaptive)))
    return [*(7919 * index % text_size for index in range(count)), *adaptive]


class DirectoryWeights(LazyWeights):
    """The weights of a model directory, read by Transformers from disk on access."""

    def __init__(self, folder: Path, dtype: torch.dtype, offload: Path) -> None:
        logging.disable_progress_bar()
        # accelerate warns that the weights are offloaded to disk.
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
            # Copy: a view would keep the mapped file in memory, and is not aligned.
            weight: Tensor = getattr(module, kind)
            return weight.detach().clone()


def _trained_model(
    trained: Trained, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return the trained model in float32, with weights rounded to `dtype`."""
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
    """Return the directory's model in float32, loaded as a server would."""
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
    """Return a model that loads each layer's `weights` only while the layer computes."""
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

    Transformers reads some architectures in float32 even if they were written in 16 bits.
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
    """Return the largest difference of logits. Raise UserError if it exceeds rounding."""
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
        # peft reads the weights of the head and the embedding outside their forward passes.
        for module in (lm.get_output_embeddings(), lm.get_input_embeddings()):
            for part in module.modules():
                stack.enter_context(align_module_device(part))
        logits: Tensor = lm(input_ids=ids, use_cache=False).logits
        return logits[0]
