"""Check this machine's GPUs: `bash launch/gpu_check.sh` runs `pytest -m gpu tests/gpu`.

GPU_CHECK_DEVICE=cpu runs the checks on a CPU with tiny shapes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.shapes import DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = DEVICE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if absent:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Any:
    """Return a function that prints figures as one line of JSON."""
    return lambda **figures: print(f"\n{request.node.name}: {json.dumps(figures)}")
