"""What figures were measured on, and what they were made by."""

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from conf.stage import commit, versions


def hardware() -> dict[str, Any]:
    """The processor's name, its cores and the threads in use, and the GPU's name where there is one."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def circumstances(config: Any) -> dict[str, Any]:
    """The moment, the code, the machine and the settings, as every report says them."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "settings": asdict(config),
    }


def cpu() -> str:
    """The processor by its name, or by its kind where the system tells no name."""
    return processor() or platform.processor() or platform.machine()


def processor() -> str | None:
    """The processor's name as Linux tells it; None elsewhere, and of those that have none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
