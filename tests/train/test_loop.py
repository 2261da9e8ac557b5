"""What ends a run, in a sentence. Whole runs: test_resume.py, tests/test_pipeline.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf import RankLocalError
from train.loop import Trainer


def test_memory_that_runs_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank showed a traceback, though a batch that is too large is the user's setting."""

    def step() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr("train.loop.Pulse", lambda *_, **__: None)
    monkeypatch.setattr("train.loop.shared_store", lambda: None)
    released: list[bool] = []
    trainer: Any = SimpleNamespace(
        rank=0,
        ranks=1,
        step=6,
        saved=4,
        config=SimpleNamespace(micro_batch=2),
        checkpoints=SimpleNamespace(release=lambda: released.append(True)),
        _run=step,
    )
    with pytest.raises(RankLocalError, match=r"micro_batch=2 in step 7, found CUDA out of .*; step 4 is saved"):
        Trainer.run(trainer)
    assert released
