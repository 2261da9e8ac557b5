"""The written directory read back from the disk and held against the training folder it came from.

Knows what must be equal and how nearly; what is compared is train.export.models'.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf import UserError
from conf.characters import print_line
from data_prep.shards import Shards
from train.export.acceptance import CHUNK, Window, announce, check_acceptance, count_sequences, measure
from train.export.models import OnDisk, read_model, resident, trained_model
from train.export.trained import Trained
from train.lora import Gate, adapter_weights
from train.model import AdaptiveLM

POSITIONS = 128  # of a held-out sequence, whose logits are compared
# How far apart logits may be after a merge, relative to the largest: by weights that are rounded to the type of
# the export, in units of its precision, and by sums in another order, through all layers.
ROUNDINGS, SUMS = 16, 1e-4


@dataclass(frozen=True)
class Verified:
    """What was compared, and what was found."""

    weights: int  # tensors, equal to the last bit
    positions: int  # rows of logits
    logit_difference: float  # the largest
    agreement: float  # share of rows with the same greedy choice
    sequences: int  # held-out ones that were measured again
    validation: dict[str, float]  # the training's last metrics
    measured: dict[str, float]  # the same metrics of the written directory
    intervals: dict[str, tuple[float, float]]  # theirs, of 95 %
    # Expected accepted drafts of a chain of L: by adaptive tokens, by n-grams, by all sources
    drafts: dict[str, float] = field(default_factory=dict)


def verify(
    out: Path, trained: Trained, data: Path, *, dtype: torch.dtype, kept: bool, sequences: int | None
) -> tuple[Verified, list[Window]]:
    """Read `out` back; compare its weights and its logits with the training's, and its acceptance with the last
    validation. Return the comparison, and windows with the answers of adaptive tokens.

    Raises UserError where they disagree, and where the device has too little memory to find out.

    Weights must be the training's, rounded to `dtype`, to the last bit: all rows of an embedding, of which one
    text has few. Logits tell that what is loaded also computes the same. They are computed in float32 on both
    sides, the training's from its weights rounded to `dtype`, and must be equal as well. Only where an adapter
    was merged does the training's side add it in the forward pass, from float32 weights, and the two may
    differ by rounding.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with torch.no_grad(), TemporaryDirectory(dir=out) as aside:
            read = OnDisk(out, dtype, Path(aside))
            return _verify(out, read, trained, data, device, dtype=dtype, kept=kept, sequences=sequences)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"verify: wanted memory of the {device.type} for a layer and a sequence, found too little "
            f"({str(error).splitlines()[0]}); nothing is written: CUDA_VISIBLE_DEVICES= verifies on the CPU, "
            "on as few sequences as verify_sequences=N says, and verify=false not at all"
        ) from error


def _verify(
    out: Path,
    read: OnDisk,
    trained: Trained,
    data: Path,
    device: torch.device,
    *,
    dtype: torch.dtype,
    kept: bool,
    sequences: int | None,
) -> tuple[Verified, list[Window]]:
    shards, merged = Shards(data, "held_out"), trained.lora.rank > 0 and not kept
    weights = _compare_weights(read, trained.served_weights(dtype, kept=kept))
    theirs = trained_model(trained, torch.float32 if merged else dtype, device)
    ours = read_model(out, read, trained, torch.float32, device, kept=kept)
    if kept:
        weights += _compare_weights(adapter_weights(ours.state_dict()), adapter_weights(trained.weights(dtype)))
    ids = _tokens(trained, shards).to(device)
    difference, agreement = _compare(_logits(ours, ids), _logits(theirs, ids), dtype, merged=merged)
    lm = read_model(out, read, trained, dtype, device, kept=kept)
    gate = Gate(lm) if trained.lora.gated else None
    module = AdaptiveLM(lm, chunk=CHUNK, L=trained.objective.L, gate=gate)
    count, every = count_sequences(trained, shards, sequences, device)
    print_line(f"export: {announce(trained, shards, count=count, every=every, device=device)}")
    with resident(lm):
        measured, windows = measure(module, trained, shards, count=count, device=device)
    check_acceptance(measured, trained.validation, every=every)
    verified = Verified(
        weights=weights,
        positions=ids.numel(),
        logit_difference=difference,
        agreement=agreement,
        sequences=measured.sequences,
        validation=trained.validation,
        measured=measured.means,
        intervals=measured.intervals,
    )
    return verified, windows


def describe(verified: Verified) -> str:
    """In one sentence."""
    before, after = verified.validation, verified.measured
    told = (
        f"read back: all {verified.weights} weights equal, {verified.positions} rows of logits differ by at "
        f"most {verified.logit_difference:.2g} from the training's, "
        f"{100 * verified.agreement:.0f} % with the same greedy choice"
    )
    for name in ("standard_loss", "accepted"):
        if name in after:
            told += f"; {name} {after[name]:.3f}"
            if name in verified.intervals:
                low, high = verified.intervals[name]
                told += f" ({low:.3f} to {high:.3f})"
            told += f", {before[name]:.3f} in training"
    return f"{told} ({verified.sequences} held-out sequences)"


def _compare_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> int:
    """How many tensors were compared, one at a time. Raises UserError for the first that is not the same.

    What the library reads in a wider type than was written, float32 of some architectures, loses nothing by it.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            found = "none" if name not in ours else "one that was not trained"
            raise UserError(f"verify: wanted the weights that were trained, found {found} of the name {name}")
        one = ours[name]
        if not torch.equal(one, theirs[name].to(one.device, one.dtype)):
            raise UserError(
                f"verify: wanted the training's {name} from the directory read back, to the last bit, found "
                "other numbers; nothing is written"
            )
    return len(ours)


def _tokens(trained: Trained, shards: Shards) -> Tensor:
    """(1, n) ids of which logits are compared: a held-out text, and the adaptive tokens, which no text has."""
    sequence, adaptive = shards[0], trained.manifest["adaptive"]
    text = sequence.tokens[: min(sequence.used, POSITIONS - len(adaptive))].astype("int64")
    return torch.tensor([*text.tolist(), *adaptive])[None]


def _compare(ours: Tensor, theirs: Tensor, dtype: torch.dtype, *, merged: bool) -> tuple[float, float]:
    """The largest difference of (n, V) logits, and the share of rows with the same likeliest token.

    Raises UserError when the difference is more than it may be.
    """
    difference = float((ours - theirs).abs().max())
    share = max(ROUNDINGS * torch.finfo(dtype).eps, SUMS) if merged else 0.0
    allowed = share * float(theirs.abs().max())
    if not difference <= allowed:  # which nothing is that is no number
        raise UserError(
            f"verify: wanted the training's logits from the directory read back, within {allowed:.3g}, found a "
            f"difference of {difference:.3g}; nothing is written"
        )
    return difference, float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())


def _logits(lm: PreTrainedModel, ids: Tensor) -> Tensor:
    """(n, V) of (1, n) ids."""
    with resident(lm):
        return lm(input_ids=ids, use_cache=False).logits[0]
