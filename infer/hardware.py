"""What figures were measured on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def hardware() -> dict[str, Any]:
    """The processor's name, its cores and the threads in use, and the GPU's name where there is one."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def cpu() -> str:
    """The processor by its name, or by its kind where the system tells no name."""
    return processor() or platform.processor() or platform.machine()


def processor() -> str | None:
    """The processor's name as Linux tells it; None elsewhere, and of those that have none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
