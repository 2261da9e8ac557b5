"""Tables of what rows cost (costs.py), each measured once and kept in the user's cache folder.

For a week, by device, threads, ranks, model, dtype, batch, context (up to 4,096 tokens) and by how tokens are
chosen: of sampled text the drafts take longer to read. What processors of the library change are picks that
are made when they are asked for, which are in no table (costs.py).
"""

import hashlib
import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

from conf.files import write_json
from conf.sealed import Broken, sealed, unsealed
from infer.drafters.costs import Costs, measure_costs, measure_ratio, measured_at, work
from infer.engine.agreement import agreed_value, shares
from infer.engine.gate import GatedLinear
from infer.engine.sampling import Sampling
from infer.hardware import processor

SCHEMA = 6  # of what is kept, and of how it is measured
WEEK = 7 * 24 * 3600.0


def find_costs(lm: PreTrainedModel, *, batch: int, capacity: int, sampling: Sampling) -> Costs:
    """L(q) at half of a context of about `capacity` tokens, from the cache folder or measured now."""
    context = measured_at(capacity, lm)
    path = _folder() / f"costs-{_key(lm, batch, context, sampling)}.json"
    known = agreed_value(lm, _read(path))
    if known is not None:
        return known
    costs = measure_costs(lm, batch=batch, context=context, sampling=sampling)
    with suppress(OSError):  # a home that cannot be written: the next process measures again
        write_json(path, sealed({"rows": costs.rows, "ms": costs.ms, "device": device_name(lm)}))
    return costs


def find_both(
    target: PreTrainedModel, draft: PreTrainedModel, *, batch: int, capacity: int, sampling: Sampling
) -> tuple[Costs, Costs]:
    """L(q) of a target and of what drafts for it, on one scale.

    Their tables were measured at different moments of a machine that is now faster and now slower. What a
    draft is worth hangs on the ratio of the two, so a row of each is timed again, in turns; of the draft
    model with what may follow it, which of sampled text takes longer. Ranks that share the target agree.
    """
    ours, theirs = (find_costs(lm, batch=batch, capacity=capacity, sampling=sampling) for lm in (target, draft))
    theirs = agreed_value(target, theirs)  # each rank measured a draft model of its own
    context = measured_at(capacity, target, draft)
    ratio = measure_ratio(target, draft, batch=batch, context=context, sampling=sampling)
    scale = ratio * ours(1) / theirs(1)
    return ours, Costs(theirs.rows, tuple(scale * ms for ms in theirs.ms))


def _read(path: Path) -> Costs | None:
    """What was measured before; None for nothing, too long ago, another version, a broken file, or no time."""
    try:
        if abs(time.time() - path.stat().st_mtime) > WEEK:  # also of a clock that was set back since
            return None
        found = unsealed(path)
        costs = Costs(tuple(found["rows"]), tuple(found["ms"]))
        return costs if min(costs.ms) > 0 else None
    except (OSError, Broken, KeyError):
        return None


def _key(lm: PreTrainedModel, batch: int, context: int, sampling: Sampling) -> str:
    config = {key: value for key, value in lm.config.to_dict().items() if not key.startswith("_")}
    gated = [list(w.shape) for m in lm.modules() if isinstance(m, GatedLinear) for w in m.adapter]
    # Two machines may share a home: where no processor has a name, the machine's tells them apart.
    facts = [SCHEMA, device_name(lm), processor() or platform.node(), shares(lm), torch.__version__]
    facts += [str(lm.dtype), config, gated, batch, context, work(sampling)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def device_name(lm: PreTrainedModel) -> str:
    """What the model runs on."""
    if lm.device.type == "cuda":
        return torch.cuda.get_device_name(lm.device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)"


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # A user without a home, as in a container, has "~/.cache", which must not become a folder called "~".
    return (cache if cache.is_absolute() else Path(os.devnull)) / "adaptive-tokens"
