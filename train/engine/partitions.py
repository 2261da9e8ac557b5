"""Weights divided over ranks by DeepSpeed: loaded so, and put together.

Knows the engine's files; knows no run.
"""

import contextlib
from collections.abc import Iterator

from torch import nn
from transformers.integrations import HfDeepSpeedConfig

from train.config import TrainConfig
from train.engine import engine  # noqa: F401 (before deepspeed: it sets what DeepSpeed reads then)
from train.engine.ranks import world_size
from train.engine.settings import deepspeed_config

# isort: split
import deepspeed


@contextlib.contextmanager
def loading(config: TrainConfig) -> Iterator[None]:
    """While a model is loaded from its directory: ZeRO 3 takes every weight apart as it comes, so that
    no rank ever holds the whole model.
    """
    alive = None
    if config.stage == 3 and not config.model.random_init:
        # Transformers looks for a living object of this kind.
        alive = HfDeepSpeedConfig(deepspeed_config(config, ranks=world_size()))
    yield
    del alive


def count_parameters(module: nn.Module) -> int:
    """Of the whole module, also where ZeRO 3 has taken it apart."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def whole(*modules: nn.Module) -> contextlib.AbstractContextManager[None]:
    """While the block lasts, these modules' own weights are in one piece, where ZeRO 3 has divided them;
    what is written to them on rank 0 is kept.
    """
    return deepspeed.zero.GatheredParameters(
        [p for m in modules for p in m.parameters(recurse=False)], modifier_rank=0
    )
