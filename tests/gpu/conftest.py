"""Checks of this machine's GPUs: `bash launch/gpu_check.sh`, that is `pytest -m gpu tests/gpu`.

GPU_CHECK_DEVICE=cpu tries the checks themselves, with tiny shapes.
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
    """Print figures as a line of JSON."""
    return lambda **figures: print(f"\n{request.node.name}: {json.dumps(figures)}")
