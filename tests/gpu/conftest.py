"""Checks of this machine's GPUs, without downloads, by `bash launch/gpu_check.sh` alone.

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
    """Print figures as a line of JSON, with the device."""

    def line(**figures: Any) -> None:
        name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
        print(f"\n{request.node.name}: {json.dumps({'device': name, **figures})}")

    return line
