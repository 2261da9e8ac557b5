import pytest
import torch

from conf import LoneError, UserError
from train.checks import check_devices, check_ranks


def test_ranks_with_different_settings_are_refused() -> None:
    """One rank read a YAML before it was edited, the other after: they saved at different steps, and hung."""
    check_ranks([{"steps": 4, "save_every": 2}] * 3)
    with pytest.raises(
        UserError, match="save_every: wanted the same on every rank, found 2 on rank 0 and 3 on rank 1"
    ):
        check_ranks([{"steps": 4, "save_every": 2}, {"steps": 4, "save_every": 3}])


def test_a_rank_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processes on four GPUs, and the demo's two on one: a traceback of PyTorch's."""
    monkeypatch.setenv("LOCAL_RANK", "4")
    check_devices()  # no GPU at all: ranks share the processor
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(LoneError, match="as it has GPUs, found 4"):
        check_devices()
    monkeypatch.setenv("LOCAL_RANK", "3")
    check_devices()
