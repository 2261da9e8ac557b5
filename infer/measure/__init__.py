"""Measuring: decoders timed (runs.py), work divided over ranks (distributed.py), and what it ran on."""

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from conf.stage import commit, versions
from infer.drafters.cost_tables import processor


def hardware() -> dict[str, Any]:
    """Return the processor's name, its cores and the threads in use, and the GPU's name where there is one."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def circumstances(config: Any) -> dict[str, Any]:
    """Return the date, commit, hardware, versions and settings for a report."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "settings": asdict(config),
    }


def cpu() -> str:
    """Return the processor's name, or its kind where the system has no name."""
    return processor() or platform.processor() or platform.machine()
