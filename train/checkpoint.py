"""Checkpoints of a run: what is kept, where, and how a run is found again.

    <out>/run.json             what the run is made from, written before its first step
    <out>/checkpoints/<tag>/   the engine's files; `latest` beside them names the newest
    <out>/manifest.json        written last, when the run is finished

Knows folders; the engine writes and reads the tensors.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from conf.stage import check_same, write_json
from train.engine import Engine


class Checkpoints:
    """The checkpoint folder of one run; every rank holds one."""

    def __init__(self, out: Path, made: Mapping[str, Any], *, rank: int) -> None:
        self.folder = out / "checkpoints"
        self._rank = rank
        begun = out / "run.json"
        if begun.is_file():
            check_same(json.loads(begun.read_text(encoding="utf-8")), made, out)
        elif rank == 0:
            write_json(begun, made)
        dist.barrier()

    def resume(self, engine: Engine) -> dict[str, Any] | None:
        """The state of the latest checkpoint, loaded into the engine; None for a new run."""
        return engine.load(self.folder) if (self.folder / "latest").is_file() else None

    def save(self, engine: Engine, step: int, state: dict[str, Any]) -> None:
        """Save after `step` steps and remove the checkpoints before it."""
        tag = f"step-{step:06d}"
        engine.save(self.folder, tag, state)
        dist.barrier()
        if self._rank == 0:
            for old in self.folder.glob("step-*"):
                if old.name != tag:
                    shutil.rmtree(old)
        dist.barrier()
