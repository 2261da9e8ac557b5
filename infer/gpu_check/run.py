"""A run of infer.gpu_check: parity first, then speed. A part that fails is reported; the others still run.

The clock is read when the device is idle. Every figure is a median over rounds, with the quartiles beside it;
what is compared takes turns.
"""

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from conf import UserError
from conf.console import PlainConsole
from conf.errors import NOT_IDENTICAL, in_one_line
from conf.files import file_to_write, write_json
from conf.stage import commit, versions
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.output import Request
from infer.engine.runner import Runner, duration
from infer.engine.sampling import GREEDY
from infer.gpu_check import SHAPES, GpuCheckConfig, random_model
from infer.gpu_check.parity import check_parity
from infer.loop import Drafter, Drafters, Limits, decode
from infer.measure import cpu
from infer.report.tables import table
from infer.report.terminal import print_table
from infer.speed.limit import Needs, bandwidth
from infer.trees.tree import Tree

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WARM_UPS = 3
TURNS = 5  # of the loops, each on a text of its own
K = TypeVar("K")
Spread = dict[str, float]  # median, lower and upper quartile


def clock(device: torch.device) -> float:
    """Return seconds, when all that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_turns(tasks: Mapping[K, Callable[[], Any]], *, rounds: int, device: torch.device) -> dict[K, Spread]:
    """Return milliseconds of each task."""
    for task in tasks.values():
        for _ in range(WARM_UPS):
            task()
    times: dict[K, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            began = clock(device)
            task()
            times[name].append(1e3 * duration(began, clock(device)))
    return {name: spread(seconds) for name, seconds in times.items()}


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def cost_of_rows(lm: PreTrainedModel, *, context: int, rounds: int, compile: bool) -> dict[int, Spread]:
    """Measure L(q) in milliseconds: a forward of q rows, its picks on the host."""
    runner = Runner(lm, capacity=context, max_rows=ROWS[-1], static=True, compile=compile)
    # As costs.py does: one row and many fit the same columns, or only one of them would pay for more.
    runner.prefill([_prompt(lm, max(1, context - ROWS[-1]))])

    def forward(q: int) -> None:
        tree = Tree.chain(1, [1] * (q - 1))
        tree.walk(runner.forward([tree], [Request([1])], GREEDY).chooser(0, ()))

    return in_turns({q: partial(forward, q) for q in ROWS}, rounds=rounds, device=lm.device)


def loop_times(
    lm: PreTrainedModel, ks: Sequence[int], *, context: int, rounds: int, compile: bool
) -> dict[str, Spread]:
    """Return milliseconds of a loop: a plain step, two forwards of two-forward SDSAT, one of one-forward.

    With random weights next to nothing is accepted, so these are times of loops, not of tokens.
    """
    drafters: dict[str, Callable[[], Drafter]] = {"plain": Drafter}
    for k in ks:
        drafters[f"two-forward k={k}"] = partial(AdaptiveDrafter, [2], FixedPolicy(k))
        drafters[f"one-forward k={k}"] = partial(AdaptiveDrafter, [2], FixedPolicy(k, "all"))
    rows = max(new().max_rows for new in drafters.values())
    each = -(-rounds // TURNS)
    capacity = context + 2 * (WARM_UPS + each) * (max(ks) + 1)
    runner = Runner(lm, capacity=capacity, max_rows=rows, static=True, compile=compile)
    request = Request(_prompt(lm, context))
    times: dict[str, list[float]] = {name: [] for name in drafters}
    for _ in range(TURNS):
        for name, new in drafters.items():
            # These texts are left before any draft has to be cut short.
            steps = decode(runner, [request], Drafters(new), Limits(capacity - context))
            list(islice(steps, 2 * WARM_UPS))
            for _ in range(each):
                began = clock(lm.device)
                list(islice(steps, 2 if name.startswith("two") else 1))
                times[name].append(1e3 * duration(began, clock(lm.device)))
    return {name: spread(seconds) for name, seconds in times.items()}


def _prompt(lm: PreTrainedModel, n: int) -> list[int]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, lm.config.vocab_size, (n,), generator=generator).tolist()


def show(report: dict[str, Any]) -> None:
    """Print parity in a line for each dtype, and a table for each shape."""
    console = PlainConsole()
    console.print(f"{report['hardware']['name']}, {report['date']}")
    for dtype in dict.fromkeys(row["dtype"] for row in report["parity"]):
        rows = [row for row in report["parity"] if row["dtype"] == dtype]
        line = f"{dtype}: {sum(row['passed'] for row in rows)} of {len(rows)} comparisons passed"
        flips = [row["flips_per_1000"] for row in rows if "flips_per_1000" in row]
        console.print(line + (f", at most {max(flips):.1f} near-ties per 1,000 tokens" if flips else ""))
        for row in rows:
            if row.get("fell_back"):
                console.print(f"{row['decoder']}: {row['fell_back']}", markup=False)
    if report["bytes_per_second"]:
        speeds = ", ".join(
            f"{name} {value / 1e9:,.0f} GB/s" for name, value in report["bytes_per_second"].items()
        )
        console.print(f"memory: {speeds}")
    for name, why in report["failed"].items():
        console.print(f"{name} failed: {why}", markup=False)
    for shape, figures in report["shapes"].items():
        if "out_of_memory" in figures:
            console.print(f"{shape}: {figures['out_of_memory']}")
            continue
        line = f"{shape}: plain {figures['plain_tokens_per_second']:.1f} tokens/s"
        if figures["roofline_tokens_per_second"]:
            line += (
                f", {100 * figures['plain_share_of_roofline']:.0f} % of the roofline's "
                f"{figures['roofline_tokens_per_second']:.1f}"
            )
        console.print(line)
        for name, key, first, of in (("rows", "rows_ms", 1, "L(1)"), ("loop", "loops_ms", "plain", "plain")):
            times = figures[key]
            body = [
                [
                    str(rows_or_loop),
                    f"{ms['median']:.2f}",
                    f"{ms['low']:.2f}–{ms['high']:.2f}",
                    f"{ms['median'] / times[first]['median']:.2f}",
                ]
                for rows_or_loop, ms in times.items()
            ]
            print_table(console, table("", [name, "ms", "quartiles", f"/ {of}"], body))


BLOCK = 2**30  # bytes of the tensor that measures the bandwidth


def check_gpu(config: GpuCheckConfig) -> None:
    """Check, measure, write, show."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda needs a CUDA device, got none (device=cpu shapes=[tiny] tries the check)")
    out = Path(os.path.realpath(config.out))
    with suppress(FileExistsError, NotADirectoryError):  # which the next line tells
        out.parent.mkdir(parents=True, exist_ok=True)
    file_to_write("out", config.out)
    report: dict[str, Any] = {
        "hardware": gpu_hardware(config.device),
        "versions": {**versions(), "cuda": torch.version.cuda, "commit": commit()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(config),
        "finished": False,
        "failed": {},
        "parity": [],
        "bytes_per_second": None,
        "shapes": {},
    }

    def attempt(name: str, part: Callable[[], Any]) -> Any:
        """Return the part's result, or None; then the file is written, whatever becomes of the rest."""
        try:
            return part()
        except Exception as error:  # a check of hardware: any failure is a finding, not the end
            report["failed"][name] = f"{type(error).__name__}: {in_one_line(error)}"
            return None

    device, size = torch.device(config.device), BLOCK if config.device == "cuda" else BLOCK >> 6
    report["parity"] = attempt("parity", lambda: _parity(config)) or []
    write_json(out, report)
    report["bytes_per_second"] = attempt("bytes_per_second", lambda: bandwidth(device, size=size))
    write_json(out, report)
    for name in config.shapes:
        result = attempt(name, partial(measured, name, config, report["bytes_per_second"]))
        report["shapes"] |= {name: result} if result is not None else {}
        write_json(out, report)
    write_json(out, {**report, "finished": True})
    show(report)
    _judge(report, out)


def _parity(config: GpuCheckConfig) -> list[dict[str, Any]]:
    return check_parity(device=config.device, prompts=config.prompts, compile=config.compile)


def _judge(report: dict[str, Any], out: Path) -> None:
    failed = [row for row in report["parity"] if not row["passed"]]
    if failed:
        first = failed[0]
        raise UserError(
            f"{out}: every comparison must give the tokens of plain decoding, got others in {len(failed)} of "
            f"{len(report['parity'])} that differ, the first {first['decoder']}, {first['sampling']}, "
            f"{first['dtype']}",
            page=NOT_IDENTICAL,
        )
    if report["failed"]:
        name, why = next(iter(report["failed"].items()))
        raise UserError(
            f"out={out}: every part must finish, got {len(report['failed'])} that failed, "
            f"the first {name} ({why})"
        )


def measured(shape: str, config: GpuCheckConfig, speeds: dict[str, float] | None) -> dict[str, Any]:
    """Measure L(q), loops, and plain decoding against the roofline; or say that the device is too small."""
    context, rounds, compile = config.context, config.rounds, config.compile
    if config.device == "cuda":  # what the last shape left
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        lm = random_model(SHAPES[shape], dtype=getattr(torch, config.dtype), device=config.device)
        rows = cost_of_rows(lm, context=context, rounds=rounds, compile=compile)
        loops = loop_times(lm, config.k, context=context, rounds=rounds, compile=compile)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    needs = Needs.of(lm)
    assert needs is not None  # none of the shapes is a mixture of experts
    read = needs.bytes(1, context)
    roofline = max(speeds.values()) / read if speeds else None
    plain = 1e3 / loops["plain"]["median"]
    return {
        "rows_ms": rows,
        "loops_ms": loops,
        "bytes_per_token": read,
        "roofline_tokens_per_second": roofline,
        "plain_tokens_per_second": plain,
        "plain_share_of_roofline": plain / roofline if roofline else None,
        "memory_bytes": torch.cuda.max_memory_allocated() if config.device == "cuda" else None,
    }


def gpu_hardware(device: str) -> dict[str, Any]:
    """Return the device by name."""
    if device == "cpu":
        return {"name": cpu(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None
