"""What all units of a run share: settings, machine, its physical limit, and what rows cost. Measured first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import PreTrainedModel

from infer.benchmarks.prompts import TokenPrompt
from infer.engine.sampling import GREEDY
from infer.hardware import circumstances
from infer.measure.row_times import context_for, measure_costs
from infer.models.checkpoint import is_gated
from infer.speed.config import SpeedConfig
from infer.speed.device import measure_limit


def header(
    config: SpeedConfig,
    prompts: Mapping[str, Sequence[TokenPrompt]],
    lms: Mapping[str, PreTrainedModel],
    *,
    ranks: int,
    all_: int,
) -> dict[str, Any]:
    """speed.json without its rows; `all_` is the number of units."""
    return {
        **circumstances(config),
        "model": Path(config.model).resolve().name,
        "gated": is_gated(config.model),
        "ranks": ranks,
        "all": all_,
        "limits": [one for lm in lms.values() if (one := _limit(lm, prompts, new=config.max_new_tokens))],
        "costs": [
            {"dtype": dtype, **_costs(lm, prompts, new=config.max_new_tokens)} for dtype, lm in lms.items()
        ],
    }


def _limit(
    lm: PreTrainedModel, prompts: Mapping[str, Sequence[TokenPrompt]], *, new: int
) -> dict[str, Any] | None:
    """At the mean context of all texts, and of each set's: what a forward reads of the cache depends on it.

    None for a model whose limit is not known.
    """
    limit = measure_limit(lm)
    if limit is None:
        return None
    contexts = {name: mean(len(prompt.ids) + new / 2 for prompt in some) for name, some in prompts.items()}
    sets = {name: limit.told(round(context))["forward_ms"] for name, context in contexts.items()}
    return limit.told(round(mean(contexts.values()))) | {"forward_ms_by_set": sets}


def _costs(lm: PreTrainedModel, prompts: Mapping[str, Sequence[TokenPrompt]], *, new: int) -> dict[str, Any]:
    longest = max(len(prompt.ids) for some in prompts.values() for prompt in some)
    costs = measure_costs(lm, batch=1, context=context_for(longest + new, lm), sampling=GREEDY)
    return {"rows": list(costs.rows), "ms": list(costs.ms)}
