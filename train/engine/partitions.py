"""Weights divided over ranks by DeepSpeed: loaded so, put together, divided anew.

Knows the engine's files; knows no run.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers.integrations import HfDeepSpeedConfig

from conf import UserError
from train.config import TrainConfig
from train.engine import engine  # noqa: F401 (before deepspeed: it sets what DeepSpeed reads then)
from train.engine.byte_ranges import index
from train.engine.ranks import first_ranks, world_size
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


def to_universal(checkpoint: Path, out: Path) -> None:
    """Rewrite a checkpoint into `out` so that any number of ranks can load it. Called by every rank.

    Raises UserError with the converter's last line, and for files with more than tensors and plain values.
    """
    converter: subprocess.Popen[str] | None = None
    for path in sorted(checkpoint.glob("*.pt")):
        index(path)  # the converter would run any pickle
    if torch.distributed.get_rank() == 0:
        arguments = ["--input_folder", checkpoint, "--output_folder", out, "--inject_missing_state"]
        converter = subprocess.Popen(
            [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, arguments)],
            env=os.environ | {"DS_ACCELERATOR": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal to this process ends the step, not the conversion
        )
    # Minutes for a large model: the ranks keep talking, so that no collective times out.
    code, told = None, ""
    while code is None:
        if converter is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                told = converter.communicate(timeout=5)[1]
        code, told = first_ranks((converter.poll() if converter else None, told))
    if converter is not None:
        (out.parent / "latest_universal").unlink(missing_ok=True)
    if code:
        raise UserError(
            f"{checkpoint}: wanted it rewritten for {world_size()} ranks, found "
            f"{(told.splitlines() or ['no reason'])[-1]}"
        )
