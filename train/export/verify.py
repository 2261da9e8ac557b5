"""The written directory, read back and compared with the training: weights, logits, held-out acceptance.

Acceptance is that of the last validation, on the same sequences, windows and layout. The same forwards give the
answers of adaptive tokens in some windows, to which train.export.ngram_weights is fitted. Models are read from
the disk layer by layer as they compute.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from accelerate import cpu_offload, init_empty_weights
from accelerate.utils import align_module_device
from scipy.special import stdtrit
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from conf import UserError
from conf.console import print_line
from conf.dtype import bfloat16_cost
from data_prep.shards import PackedSequence, Shards
from train.attention import register
from train.data import load_batch
from train.export.trained import Trained
from train.lora import Gate, PlainWeights, adapt, adapter_weights, read_adapter
from train.loss import summarise
from train.model import AdaptiveLM
from train.pretrained import skeleton
from train.validation import laid_out, window_seed

POSITIONS = 128  # of a held-out sequence, whose logits are compared
# Allowed difference of logits after a merge, relative to the largest logit: ROUNDINGS units of the export's
# precision for rounded weights, and SUMS for sums in another order.
ROUNDINGS = 16
SUMS = 1e-4

LEVEL = 0.95  # of intervals
CHUNK = 256  # positions whose logits exist at once
SPEED = {"cpu": 1e11, "cuda": 3e14}  # FLOP/s of a small machine, roughly
READ = 2e9  # bytes/s of a disk, roughly
SECONDS = 200  # of measuring, unless verify_sequences is set
FEWEST = 4  # sequences, however long they take
ANSWERS = 16  # likeliest tokens of an adaptive token, as many as decoding reads
# windows, and sequences with them, whose answers are read at most
WINDOWS = 4096
TEXTS = 64
# Allowed difference of a mean on the same sequences by rounding: a share of it, common to all positions, and
# DEVIATIONS of independent noise of the positions. Measured with the demo in three types: 0.00014 of a loss,
# and 3 of 1,905 drafts; rope_theta times 1.5 changes a loss by 0.0023.
# nats of a position
LOSS_SHARE = 0.001
LOSS_NOISE = 0.02
# of all positions: those whose likeliest token rounding may change
RIGHT_SHARE = 0.01
NEAR_TIES = 0.01
DEVIATIONS = 4


@dataclass(frozen=True)
class Verification:
    """What was compared, and the result."""

    weights: int  # tensors, equal to the last bit
    positions: int  # rows of logits
    logit_difference: float  # the largest
    agreement: float  # share of rows with the same greedy choice
    sequences: int  # held-out ones that were measured again
    validation: dict[str, float]  # the training's last metrics
    measured: dict[str, float]  # the same metrics of the written directory
    intervals: dict[str, tuple[float, float]]  # of 95 %, of the measured ones
    # Expected accepted drafts of a chain of L: by adaptive tokens, by n-grams, by all sources
    drafts: dict[str, float] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the comparison in one sentence."""
        text = (
            f"read back: all {self.weights} weights equal, {self.positions} rows of logits differ by at most "
            f"{self.logit_difference:.2g} from the training's, {100 * self.agreement:.0f} % with the same "
            "greedy choice"
        )
        for name in ("standard_loss", "accepted"):
            if name in self.measured:
                text += f"; {name} {self.measured[name]:.3f}"
                if name in self.intervals:
                    text += " ({:.3f} to {:.3f})".format(*self.intervals[name])
                text += f", {self.validation[name]:.3f} in training"
        return f"{text} ({self.sequences} held-out sequences)"


@dataclass(frozen=True)
class HeldOutFigures:
    """Means of metrics over sequences, their 95 % intervals (if several), and what rounding may change."""

    sequences: int
    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    roundings: dict[str, float]


@dataclass(frozen=True)
class Window:
    """The answers of adaptive tokens behind a text, and the model's own choices there.

    `document[root]` is the token that decoding verifies with the drafts. `choices` (w,) are what the model
    chooses behind it, each after the text before: all but the last are the text's own tokens. `ids` and
    `shares` are (w, m) by place, the likeliest first.
    """

    sequence: int
    document: Sequence[int]
    root: int
    choices: list[int]
    ids: list[list[int]]
    shares: list[list[float]]


def verify(
    out: Path,
    trained: Trained,
    data: Path,
    *,
    dtype: torch.dtype,
    sequences: int | None,
) -> tuple[Verification, list[Window]]:
    """Compare the directory `out` with its training; return the comparison, and windows for the n-grams.

    Weights must equal the training's, rounded to `dtype`, to the last bit. Logits, computed in float32 on both
    sides, must be equal too: they show that what is loaded computes the same. Only with a merged adapter, which
    the training's side adds in its forward pass, may they differ by rounding.

    Raise UserError for a difference, and for too little memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = Shards(data, "held_out")
    merged = trained.lora.rank > 0 and not trained.keep_adapter
    try:
        with torch.no_grad(), TemporaryDirectory(dir=out) as offload:
            written = DirectoryWeights(out, dtype, Path(offload))
            weights = _compare_weights(written, trained.served_weights(dtype))
            theirs = _trained_model(trained, torch.float32 if merged else dtype, device)
            ours = _read_model(out, written, torch.float32, device)
            if trained.keep_adapter:
                adapter = adapter_weights(trained.weights(dtype))
                weights += _compare_weights(adapter_weights(ours.state_dict()), adapter)
            ids = _token_ids(trained, shards).to(device)
            difference, agreement = _compare_logits(
                _logits(ours, ids), _logits(theirs, ids), dtype, merged=merged
            )
            # Weights are the written ones in either type; on many CPUs narrow types are far slower.
            slow = (
                device.type == "cpu" and dtype != torch.float32 and bfloat16_cost() > 1
            )
            lm = _read_model(out, written, torch.float32 if slow else dtype, device)
            gate = Gate(lm) if trained.lora.gated else None
            module = AdaptiveLM(lm, chunk=CHUNK, L=trained.objective.L, gate=gate)
            count, every, sentence = plan_measurement(
                trained, shards, sequences, device
            )
            print_line(f"export: {sentence}")
            with _resident(lm):
                measured, windows = measure(
                    module, trained, shards, count=count, device=device
                )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"verify must have {device.type} memory for a layer and a sequence, got too little "
            f"({str(error).splitlines()[0]}). Use CUDA_VISIBLE_DEVICES= to verify on the CPU, fewer "
            "verify_sequences, or verify=false."
        ) from error
    check_acceptance(measured, trained.validation, every=every)
    return Verification(
        weights=weights,
        positions=ids.numel(),
        logit_difference=difference,
        agreement=agreement,
        sequences=measured.sequences,
        validation=trained.validation,
        measured=measured.means,
        intervals=measured.intervals,
    ), windows


class DirectoryWeights(Mapping[str, Tensor]):
    """The weights of a model directory as Transformers reads them, each from the disk when it is accessed."""

    def __init__(self, folder: Path, dtype: torch.dtype, offload: Path) -> None:
        logging.disable_progress_bar()
        getLogger("accelerate").setLevel(
            ERROR
        )  # it warns that the weights stay on the disk
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
            # A copy: the mapped file would stay in memory, and is not aligned as a tensor is.
            return getattr(module, kind).detach().clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _trained_model(
    trained: Trained, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return the model as it was trained, weights rounded to `dtype`, computing in float32."""
    weights: Mapping[str, Tensor] = trained.weights(dtype)
    if not trained.lora.rank:
        return _offloaded(trained.config, weights, torch.float32, device)
    adaptive = trained.manifest["adaptive"]
    base = PlainWeights(
        skeleton(trained.config),
        trained.lora,
        weights,
        adaptive=adaptive,
        merged=False,
        dtype=dtype,
    )
    lm = _offloaded(trained.config, base, torch.float32, device)
    adapt(lm, trained.lora, adaptive=adaptive)
    adapter = {
        name: tensor.float().to(device)
        for name, tensor in adapter_weights(weights).items()
    }
    lm.load_state_dict(adapter, strict=False, assign=True)
    return lm.eval()


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
    return lm.eval()


def _offloaded(
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Return a model whose layers take their `weights` whenever they compute, and hold none in between."""
    with init_empty_weights():
        lm = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=register("sdpa"),
            trust_remote_code=False,
        )
    cpu_offload(lm, execution_device=device, state_dict=weights)
    return lm.eval()


def _resident(lm: PreTrainedModel) -> ExitStack:
    """Return a context in which head and embedding hold their weights, which others read there."""
    stack = ExitStack()
    for module in (lm.get_output_embeddings(), lm.get_input_embeddings()):
        for part in module.modules():
            stack.enter_context(align_module_device(part))
    return stack


def _compare_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> int:
    """Return the number of tensors compared. Raise UserError for the first difference.

    Some architectures are read in a wider type than was written: float32, which loses nothing.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            got = "no such weight" if name not in ours else "one that was not trained"
            raise UserError(
                f"verify: {name} must be a trained weight, got {got}. Nothing was written."
            )
        weight = ours[name]
        if not torch.equal(weight, theirs[name].to(weight.device, weight.dtype)):
            raise UserError(
                f"verify: {name} must equal the training's to the last bit, got other numbers when read back. "
                "Nothing was written."
            )
    return len(ours)


def _token_ids(trained: Trained, shards: Shards) -> Tensor:
    """Return (1, n) ids: a held-out text, and the adaptive tokens."""
    sequence = shards[0]
    adaptive = trained.manifest["adaptive"]
    text = sequence.tokens[: min(sequence.used, POSITIONS - len(adaptive))].astype(
        "int64"
    )
    return torch.tensor([*text.tolist(), *adaptive])[None]


def _logits(lm: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return (n, V) logits of (1, n) ids."""
    with _resident(lm):
        return lm(input_ids=ids, use_cache=False).logits[0]


def _compare_logits(
    ours: Tensor, theirs: Tensor, dtype: torch.dtype, *, merged: bool
) -> tuple[float, float]:
    """Return the largest difference of (n, V) logits, and the share of rows with the same likeliest token.

    Raise UserError for a difference beyond rounding.
    """
    difference = float((ours - theirs).abs().max())
    share = max(ROUNDINGS * torch.finfo(dtype).eps, SUMS) if merged else 0.0
    allowed = share * float(theirs.abs().max())
    if not difference <= allowed:  # also if it is NaN
        raise UserError(
            f"verify: logits must equal the training's within {allowed:.3g}, got a difference of "
            f"{difference:.3g} when read back. Nothing was written."
        )
    return difference, float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())


def plan_measurement(
    trained: Trained, shards: Shards, requested: int | None, device: torch.device
) -> tuple[int, int, str]:
    """Return how many of the validation's sequences to measure, how many there are, and both as a sentence."""
    parameters = int(trained.manifest["parameters"])
    every = trained.validated_sequences
    # Of one sequence: 2 FLOP per parameter and token, about one adaptive token beside each token of text, and
    # all weights from the disk in float32.
    seconds = 4 * parameters * (shards[0].tokens.size / SPEED[device.type] + 1 / READ)
    count = min(
        max(int(SECONDS / seconds), FEWEST) if requested is None else requested, every
    )
    sentence = f"measuring acceptance again on {count} of {every} held-out sequences"
    if count * seconds > 2 * SECONDS:
        sentence += (
            f": about {count * seconds / 3600:.1f} hours at {SPEED[device.type] / 1e12:g} TFLOP/s on the "
            f"{device.type} and {READ / 1e9:g} GB/s from the disk; verify_sequences=2 or verify=false is less"
        )
    return count, every, sentence


@torch.no_grad()
def measure(
    module: AdaptiveLM,
    trained: Trained,
    shards: Shards,
    *,
    count: int,
    device: torch.device,
) -> tuple[HeldOutFigures, list[Window]]:
    """Return the metrics of the first `count` held-out sequences, and windows of some of them.

    Up to WINDOWS windows of up to TEXTS sequences, evenly spaced.
    """
    objective = laid_out(trained.objective)
    seed = window_seed(trained.manifest["settings"]["seed"])
    head = module.lm.get_output_embeddings()
    stride = -(-count // TEXTS)
    most = WINDOWS // len(range(0, count, stride))
    tallies = []
    windows: list[Window] = []
    for index in range(count):
        batch: dict[str, Any] = load_batch(
            shards,
            np.array([index]),
            trained.vocab,
            objective,
            seed=seed,
            device=device,
        )
        hidden = module.encode(
            batch["ids"], batch["offsets"], batch["positions"], batch["trunk"]
        )
        rest = (batch[name] for name in ("labels", "offsets", "weights", "teachers"))
        _, tally, predicted = module.score(hidden, *rest)
        tallies.append(tally.cpu())
        if index % stride == 0:
            offsets, positions = (
                batch[name][0].cpu().numpy() for name in ("offsets", "positions")
            )
            chosen = choose_windows(offsets, positions, most=most)
            windows += _read_windows(
                index,
                shards[index],
                chosen,
                predicted[0].cpu().numpy(),
                hidden[0],
                head,
            )
    return summarise_clusters(torch.stack(tallies)), windows


def choose_windows(
    offsets: np.ndarray, positions: np.ndarray, *, most: int
) -> list[tuple[int, np.ndarray]]:
    """Return roots and columns of up to `most` windows of a (c,) layout, evenly spaced.

    offsets     0 0 0 1 2 1 1 2 3    windows   1: (3 4), 0: (5), 2: (6 7 8)
    positions   0 1 2 1 2 0 2 3 4
    """
    columns = np.flatnonzero(offsets)
    windows = (
        np.split(columns, np.flatnonzero(offsets[columns] == 1)[1:])
        if len(columns)
        else []
    )
    count = min(most, len(windows))
    chosen = (windows[i * len(windows) // count] for i in range(count))
    return [(int(positions[window[0]]), window) for window in chosen]


def _read_windows(
    index: int,
    sequence: PackedSequence,
    windows: Sequence[tuple[int, np.ndarray]],
    predicted: np.ndarray,
    hidden: Tensor,
    head: nn.Linear,
) -> Iterator[Window]:
    """Yield windows from their roots and columns, (c,) predictions and (c, d) hidden states of a sequence."""
    documents = sequence.documents
    texts: dict[int, tuple[int, list[int]]] = {}
    for root, columns in windows:
        choices = predicted[root : root + len(columns)]
        own = np.logical_and.accumulate(
            choices == sequence.tokens[root + 1 : root + 1 + len(columns)]
        )
        known = min(len(columns), int(own.sum()) + 1)
        # Not head(rows): an offloaded head would drop the weights that `_resident` holds.
        logits = linear(hidden[columns[:known]], head.weight, head.bias).float()
        values, ids = logits.topk(min(ANSWERS, logits.shape[-1]))
        document = documents[root]
        if document not in texts:
            places = np.flatnonzero(documents == document)
            texts[document] = int(places[0]), sequence.tokens[places].tolist()
        first, text = texts[document]
        shares = values.softmax(-1).tolist()
        yield Window(
            index, text, root - first, choices[:known].tolist(), ids.tolist(), shares
        )


def summarise_clusters(tallies: Tensor) -> HeldOutFigures:
    """Return the metrics of (n, L + 1, 4) tallies of n sequences.

    Positions of a sequence depend on each other, so chance draws sequences: the jackknife leaves out one after
    another, and Student's t with n - 1 degrees of freedom turns its standard error into an interval (Efron and
    Tibshirani, An Introduction to the Bootstrap, 1993, ch. 11). If none or all of n positions are right, up to
    3 / n might be otherwise (Hanley and Lippman-Hand, JAMA 1983): no share's interval is narrower.
    """
    n = len(tallies)
    total = tallies.sum(0)
    means = summarise(total)
    without = [summarise(total - tally) for tally in tallies]
    counts = total[:, 0].clamp(min=1)
    least = _share_errors(3 / counts)
    flips = _share_errors(DEVIATIONS * (NEAR_TIES / counts).sqrt())
    intervals: dict[str, tuple[float, float]] = {}
    roundings: dict[str, float] = {}
    for name, mean in means.items():
        if name == "masked":  # counts positions
            continue
        if n > 1:
            values = np.array([metrics.get(name, mean) for metrics in without])
            half = max(jackknife(values, LEVEL), least.get(name, 0.0))
            intervals[name] = (mean - half, mean + half)
        if name in flips:
            roundings[name] = RIGHT_SHARE * mean + max(flips[name], least[name])
        else:
            count = float(counts[0] if name == "standard_loss" else counts[1:].sum())
            roundings[name] = LOSS_SHARE * mean + DEVIATIONS * LOSS_NOISE / math.sqrt(
                count
            )
    return HeldOutFigures(n, means, intervals, roundings)


def _share_errors(by_offset: Tensor) -> dict[str, float]:
    """Return errors of shares of right tokens, given as (L + 1), by metric; `accepted` sums those of drafts."""
    errors = by_offset.tolist()
    return {f"accuracy_{offset}": error for offset, error in enumerate(errors)} | {
        "accepted": sum(errors[1:])
    }


def jackknife(values: np.ndarray, level: float) -> float:
    """Return half an interval's width of a mean, by its (n,) values with one sequence left out each."""
    n = len(values)
    student = float(stdtrit(n - 1, (1 + level) / 2))
    return student * math.sqrt((n - 1) / n * ((values - values.mean()) ** 2).sum())


def check_acceptance(
    measured: HeldOutFigures, validation: Mapping[str, float], *, every: int
) -> None:
    """Raise UserError for a metric that differs from the validation's, on `every` sequences, beyond chance.

    On all of them only rounding may differ. On n of N, chance drew the sequences: intervals are narrower by
    sqrt(1 - n / N) (Cochran, Sampling Techniques, 1977, 2.6), and wider so that those of all m metrics hold
    together at 95 % (Bonferroni).
    """
    n = measured.sequences
    for name, rounding in measured.roundings.items():
        mean = measured.means[name]
        allowed = rounding
        if n < every:
            low, high = measured.intervals[name]
            together = 1 - (1 - LEVEL) / len(measured.intervals)
            wider = stdtrit(n - 1, (1 + together) / 2) / stdtrit(n - 1, (1 + LEVEL) / 2)
            allowed += wider * math.sqrt(1 - n / every) * (high - low) / 2
        if not abs(validation[name] - mean) <= allowed:  # also if it is NaN
            raise UserError(
                f"verify: {name} must be {validation[name]:.4f} as in the last validation, within "
                f"{allowed:.4f}, got {mean:.4f} on {n} of its {every} held-out sequences when read back. "
                "Nothing was written; verify=false would write it."
            )
