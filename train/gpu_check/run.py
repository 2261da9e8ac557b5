"""A run of train.gpu_check: every part in a process of its own, so that none can stop or slow another.

A kernel that fails leaves a CUDA process unusable, and DeepSpeed's state is one per process.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from conf import UserError
from conf.files import file_to_write, write_json
from conf.stage import ROOT, commit, versions
from train.gpu_check.config import TrainCheckConfig

MARK = "train.gpu_check result: "  # what the line begins with on which a part prints its result
SHOWN = 2000  # characters of a failed part's last output that are kept


def run(config: TrainCheckConfig) -> None:
    """Run the parts, write the file after each, print a line for each. Raises UserError if one failed."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device must be cpu on a machine without a CUDA device, got cuda. Set device=cpu")
    out = Path(config.out)
    with suppress(FileExistsError, NotADirectoryError):  # which the next line tells
        out.parent.mkdir(parents=True, exist_ok=True)
    file_to_write("out", config.out)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "versions": {**versions(), "cuda": torch.version.cuda, "commit": commit()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(config),
        "finished": False,
        "parts": {},
    }
    console = Console(highlight=False)
    for name in config.parts:
        report["parts"][name] = result = run_part(name, config)
        write_json(out, report)
        console.print(f"{name}: {_line(result)}", markup=False)
    write_json(out, {**report, "finished": True})
    failed = [name for name, result in report["parts"].items() if not result["passed"]]
    if failed:
        raise UserError(
            f"out={out}: every part must pass, got {len(failed)} of {len(report['parts'])} that failed: "
            f"{', '.join(failed)}. The file says why"
        )


def run_part(name: str, config: TrainCheckConfig) -> dict[str, Any]:
    """The result of a part; where its process failed, "error" says how it ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if config.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    try:
        process = subprocess.run(
            command(name, config), env=environment, capture_output=True, text=True, timeout=60 * config.minutes
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "error": f"no result after minutes={config.minutes:g}"}
    lines = [line.removeprefix(MARK) for line in process.stdout.splitlines() if line.startswith(MARK)]
    if process.returncode or not lines:
        told = (process.stderr or process.stdout).strip()[-SHOWN:]
        return {"passed": False, "error": f"exit code {process.returncode}: {told}"}
    return json.loads(lines[-1])


def command(name: str, config: TrainCheckConfig) -> list[str]:
    """What runs a part."""
    return [sys.executable, "-m", "train.gpu_check.parts", name, json.dumps(asdict(config))]


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed: {result['error'].splitlines()[-1]}"
    figures = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.items()
        if name != "passed" and not isinstance(value, list | dict)
    ]
    return f"{'passed' if result['passed'] else 'failed'}: {', '.join(figures)}"
