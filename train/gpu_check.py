"""python -m train.gpu_check: training on this machine's GPU, part by part, as one JSON file.

Every part has its own process: a kernel that fails leaves a CUDA process unusable, and DeepSpeed's state is one
per process. The file is written after every part, also after one that failed.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf import UserError, run
from conf.files import file_to_write, write_json
from conf.schema import PATH
from conf.stage import ROOT, commit, versions

PARTS = ("attention", "optimizer", "dual", "branch", "resume")
MARK = "train.gpu_check result: "  # begins the line on which a part prints its result
OUTPUT = 2000  # characters of a failed part's last output in the report


@dataclass
class TrainCheckConfig:
    """python -m train.gpu_check: steps, memory and checkpoints of training on this GPU, with random weights."""

    out: str = field(metadata=PATH)  # the JSON file to write
    device: str = "cuda"  # cuda, or cpu to try the check itself with model=demo tokens=64
    model: str = "deepseek_coder_1b"  # shape that dual and branch train: a choice of training's group model
    tokens: int = 4096  # in a sequence of what is trained
    steps: int = 5  # optimizer steps that are timed, after a first
    peak_tflops: float | None = None  # of the device, in bfloat16; null: from a table of datasheets
    minutes: float = 15.0  # that one part may take
    # attention: flex against dense; optimizer: fused AdamW against plain; dual, branch: steps of them under
    # ZeRO 1; resume: a save and what follows it
    parts: list[str] = field(default_factory=lambda: list(PARTS))

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device must be cuda or cpu, got {self.device}")
        for name in self.parts:
            if name not in PARTS:
                raise ValueError(f"parts must be of {', '.join(PARTS)}, got {name}")
        for name, least in {"tokens": 16, "steps": 1, "minutes": 0.01}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def main(config: TrainCheckConfig) -> None:
    """Run the parts, write the file after each, print a line for each. Raise UserError if one failed."""
    import torch  # late: a mistake in the settings is reported without waiting for it

    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device must be cpu on a machine without a CUDA device, got cuda. Set device=cpu")
    out = Path(config.out)
    with suppress(FileExistsError, NotADirectoryError):  # reported by the next line
        out.parent.mkdir(parents=True, exist_ok=True)
    file_to_write("out", config.out)
    parts: dict[str, dict[str, Any]] = {}
    report = {
        "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "versions": {**versions(), "cuda": torch.version.cuda, "commit": commit()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(config),
        "finished": False,
        "parts": parts,
    }
    for name in config.parts:
        parts[name] = run_part(name, config)
        write_json(out, report)
        print(f"{name}: {_describe(parts[name])}", flush=True)
    write_json(out, report | {"finished": True})
    if failed := [name for name, result in parts.items() if not result["passed"]]:
        raise UserError(
            f"out={out}: every part must pass, got {len(failed)} of {len(parts)} that failed: "
            f"{', '.join(failed)}. The file says why"
        )


def run_part(name: str, config: TrainCheckConfig) -> dict[str, Any]:
    """Return the result of a part; if its process failed, "error" says how it ended."""
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
        output = (process.stderr or process.stdout).strip()[-OUTPUT:]
        return {"passed": False, "error": f"exit code {process.returncode}: {output}"}
    return json.loads(lines[-1])


def command(name: str, config: TrainCheckConfig) -> list[str]:
    """Return the command of a part."""
    return [sys.executable, "-m", "train.gpu_check_parts", name, json.dumps(asdict(config))]


def _describe(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed: {result['error'].splitlines()[-1]}"
    figures = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.items()
        if name != "passed" and not isinstance(value, list | dict)
    ]
    return f"{'passed' if result['passed'] else 'failed'}: {', '.join(figures)}"


if __name__ == "__main__":
    run("train_check", TrainCheckConfig, main)
