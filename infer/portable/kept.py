"""What one call of custom_generate leaves for the next: a runner's graphs, and what was measured and learned.

It is kept as long as the model lives, and does not keep it alive.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, proxy

from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from conf.errors import UserError
from infer.drafters.auto import AutoPolicy, Policies
from infer.drafters.costs import prior_costs
from infer.engine.attention import view_of
from infer.engine.families import check_family, check_tree
from infer.engine.forward import places_of, shares
from infer.engine.runner import Runners
from infer.engine.sampling import Sampling
from infer.models.gated import CONFIG, FOLDER, WEIGHTS, gated_layers
from infer.ngrams import ABSENT, FILE, NgramTable, open_table


@dataclass
class Kept:
    """Of one model, whose tensors lie at `places`. Nothing in here may refer to the model itself but weakly.

    `lm` decodes: a proxy of the model or, with a gated adapter, a view on the same weights that has it.
    """

    places: Hashable
    lm: PreTrainedModel
    runners: Runners
    table: NgramTable | None
    policies: Policies = field(default_factory=Policies)

    def policy(
        self,
        k: int,
        sources: frozenset[str],
        *,
        batch: int,
        capacity: int,
        sampling: Sampling,
    ) -> AutoPolicy:
        """Return the policy that learns, for such texts; what rows cost it learns with the first of them."""
        texts: Any = {"batch": batch, "capacity": capacity, "sampling": sampling}
        device = self.lm.device.type
        return self.policies.auto(k, sources, **texts, load=lambda: [prior_costs(device)])


_kept: WeakKeyDictionary[PreTrainedModel, Kept] = WeakKeyDictionary()
_lock = Lock()  # two threads must not keep two, each of which measures


def kept_for(lm: PreTrainedModel, *, has_table: bool = False, gated: bool = False) -> Kept:
    """What is known of a model. It is tried when it is new, and when it was moved since: a
    graph has the addresses of its weights. Where its export had a table and there is none, it is logged once.
    A `gated` adapter is read from where the model came from.

    Raises UserError for a model that trees do not suit or whose adapter is absent, and ValueError for one in
    several places, or one that keeps no cache.
    """
    if lm.training and lm.is_gradient_checkpointing:
        raise ValueError(
            "model must be in evaluation, got training with gradient checkpointing, which keeps no cache. "
            "Call model.eval() first."
        )
    places = places_of(lm)
    with _lock:
        found = _kept.get(lm)
        if found is None or found.places != places:
            _check_place(lm)
            check_family(lm.config)
            check_tree(lm)
            # The tensors of a view are the model's, and its modules refer to those below them alone.
            decoding: Any = view_of(lm, gated_layers(lm, _adapter_of(lm))) if gated else proxy(lm)
            runners = Runners(decoding, static=None if _is_fixed(lm) else False)
            table = found.table if found else find_table(lm, expected=has_table)
            found = _kept[lm] = Kept(places, decoding, runners, table)
        return found


def find_table(lm: PreTrainedModel, *, expected: bool) -> NgramTable | None:
    """Return the n-grams of the training data, from where the model came from; None where there are none,
    which is logged where they are `expected`.

    Raises ValueError for a table that is damaged or of a larger vocabulary.
    """
    name = lm.name_or_path or ""
    path = _file_of(lm, FILE)
    if path is not None:
        return open_table(path, lm.config.get_text_config().vocab_size)
    if expected:
        getLogger(__name__).warning(ABSENT, Path(name) / FILE)
    return None


def _adapter_of(lm: PreTrainedModel) -> Path:
    """Return the folder of a gated adapter, from where the model came from."""
    files = [_file_of(lm, f"{FOLDER}/{name}") for name in (CONFIG, WEIGHTS)]
    if None in files:
        raise UserError(
            f"model must have come with its gated adapter, got {lm.name_or_path or 'no name'} and no {FOLDER}/ "
            "there. Load the model from the directory or repository that has it."
        )
    return files[0].parent  # type: ignore[union-attr]


def _file_of(lm: PreTrainedModel, file: str) -> Path | None:
    """Return a file of the directory or, at that commit, of the hub's repository that a model came from."""
    name = lm.name_or_path or ""
    path = Path(name) / file
    if not name or path.is_file():
        return path if name else None
    try:
        cached = cached_file(name, file, revision=getattr(lm.config, "_commit_hash", None))
    except OSError:  # no such file, repository, or network
        return None
    return Path(cached) if cached else None


def _check_place(lm: PreTrainedModel) -> None:
    devices = sorted({str(parameter.device) for parameter in lm.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(f"model: wanted all of it on one device, found {', '.join(devices)}")
    if shares(lm) > 1:
        raise ValueError(f"model: wanted it in one process, found it divided over {shares(lm)}")


def _is_fixed(lm: PreTrainedModel) -> bool:
    """Whether a graph of its kernels stays true: another library's layers (adapters, quantized weights) may
    compute something else from one call to the next.
    """
    return all(type(module).__module__.split(".")[0] in ("torch", "transformers") for module in lm.modules())
