"""Verify a written directory against its training: weights, logits, acceptance.

Weights and logits must be the training's. Acceptance is measured again and reported beside
that of the last validation, on the same sequences, windows and layout. Layers are read from
the disk as they compute.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from accelerate import cpu_offload, init_empty_weights
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from conf import UserError
from data_prep.shards import Shards
from train.attention import register
from train.data import load_batch
from train.export.trained import Trained
from train.lora import Gate, adapt, adapter_weights, read_adapter
from train.loss import summarise
from train.model import AdaptiveLM
from train.validation import laid_out, window_seed

POSITIONS = 128  # of a held-out sequence, whose logits are compared
# Allowed difference of logits after a merge, relative to the largest logit: units of the
# export's precision for rounded weights, and a share for sums in another order.
MERGE_ROUNDINGS = 16
MERGE_SUMS = 1e-4

CHUNK = 256  # positions whose logits exist at once
MAX_SEQUENCES = 64  # measured, unless verify_sequences is set
MIN_SEQUENCES = 4  # measured of a model above LARGE_ON_CPU parameters without a GPU
LARGE_ON_CPU = 10**9


@dataclass(frozen=True)
class Verification:
    """The result of a comparison that found no error."""

    weights: int  # tensors, equal to the last bit
    logit_difference: float  # the largest
    sequences: int  # held-out ones that were measured again
    validation: dict[str, float]  # the training's last metrics
    measured: dict[str, float]  # the same metrics of the written directory

    def describe(self) -> str:
        """Return the comparison in one sentence."""
        text = (
            f"read back: all {self.weights} weights equal, logits differ by at most "
            f"{self.logit_difference:.2g} from the training's"
        )
        for name in ("standard_loss", "accepted"):
            if name in self.measured:
                text += f"; {name} {self.measured[name]:.3f}, "
                text += f"{self.validation[name]:.3f} in training"
        return f"{text} ({self.sequences} held-out sequences)"


@torch.no_grad()
def verify(
    out: Path,
    trained: Trained,
    data: Path,
    *,
    dtype: torch.dtype,
    sequences: int | None,
) -> Verification:
    """Compare the directory `out` with its training.

    Weights must equal the training's, rounded to `dtype`, to the last bit. Logits,
    computed in float32 on both sides, must be equal too. Only with a merged adapter, which
    the training's side adds in its forward pass, may they differ by rounding.

    Raise UserError for a difference.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = Shards(data, "held_out")
    with TemporaryDirectory(dir=out) as offload:
        written = DirectoryWeights(out, dtype, Path(offload))
        weights = _compare_weights(written, trained.served_weights(dtype))
        lm = _read_model(out, written, torch.float32, device)
        if trained.keep_adapter:
            adapter = adapter_weights(trained.weights(dtype))
            weights += _compare_weights(adapter_weights(lm.state_dict()), adapter)
        text = shards[0].tokens[:POSITIONS].tolist()
        ids = torch.tensor([[*text, *trained.manifest["adaptive"]]], device=device)
        difference = _compare_logits(lm, trained, ids, dtype)
        if device.type == "cuda":  # a CPU computes narrow types more slowly
            lm = _read_model(out, written, dtype, device)
        gate = Gate(lm) if trained.lora.gated else None
        module = AdaptiveLM(lm, chunk=CHUNK, L=trained.objective.L, gate=gate)
        large = int(trained.manifest["parameters"]) > LARGE_ON_CPU
        few = large and device.type == "cpu"
        count = sequences or (MIN_SEQUENCES if few else MAX_SEQUENCES)
        count = min(count, int(trained.validation["sequences"]))
        with _resident(lm):
            measured = measure(module, trained, shards, device, count=count)
    return Verification(
        weights=weights,
        logit_difference=difference,
        sequences=count,
        validation={name: trained.validation[name] for name in measured},
        measured=measured,
    )


class DirectoryWeights(Mapping[str, Tensor]):
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

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _trained_model(
    trained: Trained, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return the model as it was trained, weights rounded to `dtype`, in float32."""
    weights = trained.weights(dtype)
    if not trained.lora.rank:
        return _offloaded(trained.config, weights, torch.float32, device)
    base = trained.plain_weights(weights, dtype, merged=False)
    lm = _offloaded(trained.config, base, torch.float32, device)
    adapt(lm, trained.lora, adaptive=trained.manifest["adaptive"])
    adapter = {
        name: tensor.float().to(device)
        for name, tensor in adapter_weights(weights).items()
    }
    lm.load_state_dict(adapter, strict=False, assign=True)
    lm.train(False)
    return lm


def _read_model(
    out: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return the directory's model as a server would load it, computing in `dtype`."""
    config = AutoConfig.from_pretrained(
        out, local_files_only=True, trust_remote_code=False
    )
    lm = _offloaded(config, weights, dtype, device)
    if (out / "adapter").is_dir():
        read_adapter(lm, out / "adapter", dtype=dtype, device=device)
        lm.train(False)
    return lm


def _offloaded(
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Return a model whose layers hold their `weights` only while they compute."""
    with init_empty_weights():
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=register("sdpa"),
            trust_remote_code=False,
        )
    cpu_offload(lm, execution_device=device, state_dict=weights)
    lm.train(False)
    return lm


def _resident(lm: PreTrainedModel) -> ExitStack:
    """Return a context in which head and embedding hold their weights for readers."""
    stack = ExitStack()
    head: nn.Linear = lm.get_output_embeddings()
    for module in (head, lm.get_input_embeddings()):
        for part in module.modules():
            stack.enter_context(align_module_device(part))
    return stack


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
    with _resident(lm):
        logits: Tensor = lm(input_ids=ids, use_cache=False).logits
        return logits[0]


def measure(
    module: AdaptiveLM,
    trained: Trained,
    shards: Shards,
    device: torch.device,
    *,
    count: int,
) -> dict[str, float]:
    """Return the metrics of the first `count` held-out sequences."""
    objective = laid_out(trained.objective)
    seed = window_seed(trained.manifest["settings"]["seed"])
    tallies = []
    for index in range(count):
        batch = load_batch(
            shards,
            np.array([index]),
            trained.vocab,
            objective,
            seed=seed,
            device=device,
        )
        tallies.append(module(**batch)[1])
    return summarise(torch.stack(tallies).sum(0))
