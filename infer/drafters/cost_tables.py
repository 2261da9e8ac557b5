"""Tables of what rows cost (costs.py) between two processes: in the user's cache folder, one for each model,
device, threads, ranks, dtype, batch, length of texts, and way of choosing tokens.
"""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from conf.files import Corrupt, read_checksummed, with_checksum, write_json
from infer.drafters.costs import Costs, context_of, prior_costs, work
from infer.engine.forward import agreed_value, shares
from infer.engine.gate import GatedLinear
from infer.engine.sampling import Sampling

SCHEMA = 7  # of what is written, and of how it was learned
WEIGHT = 6.0  # steps that a point of an earlier process is worth at most: its machine may have been busy


class CostTables:
    """L(q) of a target and, with one, of its draft model, for texts of one kind."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        *,
        batch: int,
        capacity: int,
        sampling: Sampling,
    ) -> None:
        self._target = target
        self._draft = draft
        self._texts = (batch, context_of(capacity), work(sampling))

    def load(self) -> list[Costs]:
        """Return what earlier texts taught, or priors, in plain steps of the target; the same on all ranks."""
        return agreed_value(self._target, self._read() or self._priors())

    def save(self, *tables: Costs) -> None:
        """Write them, where the cache folder can be written."""
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        unit = tables[0].ms[0]
        written = [
            asdict(replace(table, ms=tuple(ms / unit for ms in table.ms)))
            for table in tables
        ]
        with suppress(OSError):
            write_json(
                self._path,
                with_checksum({"tables": written, "device": device_name(self._target)}),
            )

    def _priors(self) -> list[Costs]:
        priors = [prior_costs(self._target.device.type)]
        if self._draft is not None:
            ratio = self._draft.num_parameters() / self._target.num_parameters()
            layers = [
                lm.config.get_text_config().num_hidden_layers
                for lm in (self._draft, self._target)
            ]
            # A small model's step is launches, by the layer; a large one's is weights.
            scale = min(1.0, max(ratio, layers[0] / layers[1]))
            priors.append(prior_costs(self._draft.device.type, scale=scale))
        return priors

    def _read(self) -> list[Costs] | None:
        try:
            tables = read_checksummed(self._path)["tables"]
            costs = [
                Costs(*(tuple(table[name]) for name in ("rows", "ms", "weights")))
                for table in tables
            ]
        except (OSError, Corrupt, KeyError):
            return None
        known = len(costs) == 1 + (self._draft is not None)
        if not known or min(min(table.ms) for table in costs) <= 0:
            return None
        return [
            replace(table, weights=tuple(min(w, WEIGHT) for w in table.weights))
            for table in costs
        ]

    @cached_property
    def _path(self) -> Path:
        # Two machines may share a home: where no processor has a name, the machine's tells them apart.
        target = self._target
        facts = [
            SCHEMA,
            device_name(target),
            processor() or platform.node(),
            shares(target),
            torch.__version__,
        ]
        facts += [_facts(lm) for lm in (target, self._draft) if lm is not None]
        facts += self._texts
        key = hashlib.sha256(
            json.dumps(facts, sort_keys=True, default=str).encode()
        ).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        # A user without a home, as in a container, has "~/.cache", which must not become a folder called "~".
        folder = cache if cache.is_absolute() else Path(os.devnull)
        return folder / "adaptive-tokens" / f"costs-{key}.json"


def device_name(lm: PreTrainedModel) -> str:
    """Return what the model runs on."""
    if lm.device.type == "cuda":
        return torch.cuda.get_device_name(lm.device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)"


def processor() -> str | None:
    """Return the processor's name on Linux; None elsewhere, or where it has none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (
            line.split(":", 1)[1].strip()
            for line in lines
            if line.startswith("model name")
        ),
        None,
    )


def _facts(lm: PreTrainedModel) -> Sequence[object]:
    config = {
        key: value
        for key, value in lm.config.to_dict().items()
        if not key.startswith("_")
    }
    gated = [
        list(w.shape)
        for m in lm.modules()
        if isinstance(m, GatedLinear)
        for w in m.adapter
    ]
    return str(lm.dtype), config, gated
