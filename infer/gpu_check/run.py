"""A run of infer.gpu_check: parity first, then speed; what is known is written before the rest is tried."""

import gc
import os
import subprocess
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from conf import UserError
from conf.files import file_to_write, write_json
from conf.pages import NOT_IDENTICAL
from conf.stage import commit, versions
from infer.gpu_check import timing
from infer.gpu_check.config import GpuCheckConfig
from infer.gpu_check.models import random_model
from infer.gpu_check.parity import check_parity
from infer.gpu_check.shapes import SHAPES
from infer.gpu_check.show import show
from infer.hardware import cpu
from infer.speed.device import bandwidth
from infer.speed.limit import Needs

BLOCK = 2**30  # bytes of the tensor that measures the bandwidth


def run(config: GpuCheckConfig) -> None:
    """Check, measure, write, show."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device=cuda: wanted a CUDA device, found none (device=cpu shapes=[tiny] tries the check)"
        )
    out = Path(os.path.realpath(config.out))
    with suppress(FileExistsError, NotADirectoryError):  # which the next line tells
        out.parent.mkdir(parents=True, exist_ok=True)
    file_to_write("out", config.out)
    report: dict[str, Any] = {
        "hardware": hardware(config.device),
        "versions": {**versions(), "cuda": torch.version.cuda, "commit": commit()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(config),
        "finished": False,
        "parity": check_parity(device=config.device, prompts=config.prompts, compile=config.compile),
    }
    write_json(out, report)  # whatever becomes of the rest
    device = torch.device(config.device)
    size = BLOCK if config.device == "cuda" else BLOCK >> 6
    report["bytes_per_second"] = bandwidth(device, size=size)
    report["shapes"] = {name: measured(name, config, report["bytes_per_second"]) for name in config.shapes}
    write_json(out, {**report, "finished": True})
    show(report)
    failed = [row for row in report["parity"] if not row["passed"]]
    if failed:
        first = failed[0]
        raise UserError(
            f"{out}: wanted the tokens of plain decoding in every comparison, found {len(failed)} of "
            f"{len(report['parity'])} that differ, the first {first['decoder']}, {first['sampling']}, "
            f"{first['dtype']}",
            page=NOT_IDENTICAL,
        )


def measured(shape: str, config: GpuCheckConfig, speeds: dict[str, float]) -> dict[str, Any]:
    """L(q), loops, and plain decoding against the roofline; or that the device is too small."""
    context, rounds, compile = config.context, config.rounds, config.compile
    if config.device == "cuda":  # what the last shape left
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        lm = random_model(SHAPES[shape], dtype=getattr(torch, config.dtype), device=config.device)
        rows = timing.cost_of_rows(lm, context=context, rounds=rounds, compile=compile)
        loops = timing.loops(lm, config.k, context=context, rounds=rounds, compile=compile)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    needs = Needs.of(lm)
    assert needs is not None  # none of the shapes is a mixture of experts
    read = needs.bytes(1, context)
    roofline = max(speeds.values()) / read
    plain = 1e3 / loops["plain"]["median"]
    return {
        "rows_ms": rows,
        "loops_ms": loops,
        "bytes_per_token": read,
        "roofline_tokens_per_second": roofline,
        "plain_tokens_per_second": plain,
        "plain_share_of_roofline": plain / roofline,
        "memory_bytes": torch.cuda.max_memory_allocated() if config.device == "cuda" else None,
    }


def hardware(device: str) -> dict[str, Any]:
    """The device by name."""
    if device == "cpu":
        return {"name": cpu(), "threads": torch.get_num_threads()}
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "driver": _driver(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None
