"""Measure one GPU for ten minutes: `bash launch/gpu_check.sh --figures OUT PIECE ...`.

The most important part runs first. Each part is a process with a time limit, and writes its
result to OUT when it ends:

    speed    model=smollm2 by every decoder, greedy and at temperature 1; texts are compared
    rows     L(q) for the shapes of SmolLM2 and CodeLlama-7B, and the share of peak bandwidth
    gated    a training step of 7B's shape by gated LoRA: seconds, MFU, memory and planned memory
    dual     the same with the paper's objective and all weights, with as many layers as fit
    zero     test that ZeRO stages agree, and that the step after a resume is the same

The PIECEs are consecutive parts of SmolLM2-135M's GGUF file, for transfers with a size limit.
The program needs no network. GPU_CHECK_DEVICE=cpu runs the parts with tiny shapes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from conf.runs.files import write_json
from conf.runs.stage import ROOT
from tests.gpu.shapes import CODELLAMA_7B, DEVICE, LIVELY, random_model

ON_GPU = DEVICE == "cuda"
ROWS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 81)
STEPS = 4  # timed steps, after two warm-up steps
TOKENS = 16384 if ON_GPU else 64
TRAINED = "codellama_7b" if ON_GPU else "tiny"
MEMORY_SHARE = (
    0.7  # share of the memory that the plan may fill, since it is an estimate
)
RECIPES = {
    "gated": ["experiment=sdsat_7b_best"] if ON_GPU else ["lora.rank=4"],
    "dual": ["objective=dual"],
}
GIB = 2**30


@dataclass(frozen=True)
class Part:
    """A command with its time limit in seconds."""

    name: str
    seconds: float
    command: list[str]


def main() -> None:
    """Run all parts, or measure one part in this process (--part)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "pieces", nargs="*", type=Path, help="parts of SmolLM2's GGUF file"
    )
    parser.add_argument(
        "--prompts", default=[], nargs="*", help="prompt sets besides HumanEval"
    )
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--parts", nargs="*", help="names of the parts to run")
    parser.add_argument("--part", choices=("rows", *RECIPES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "model"
    if args.part == "rows":
        return measure_rows(model, args.out / "rows.json")
    if args.part:
        figures = measure_step([f"model={TRAINED}", *RECIPES[args.part]])
        print(json.dumps(figures), flush=True)
        return write_json(args.out / f"{args.part}.json", figures)
    began = time.monotonic()
    write_json(args.out / "machine.json", machine())
    for part in parts(args.out, args.pieces, args.prompts):
        if args.parts and part.name not in args.parts:
            continue
        left = 60 * args.minutes - (time.monotonic() - began)
        run(part, args.out, min(part.seconds, left))
    return None


def machine() -> dict[str, Any]:
    """Return device, versions and date of the measurement."""
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else platform.processor(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def parts(out: Path, pieces: Sequence[Path], prompts: Sequence[str]) -> list[Part]:
    """Return the parts; SmolLM2's parts only if its file is given."""
    python, model = [sys.executable, "-m"], out / "model"
    figures = [*python, "tests.gpu.figures", str(out)]
    result = []
    if pieces:
        gguf = out / "model.gguf"
        with gguf.open("wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())
        adapter = ROOT / "adapters" / "smollm2-135m"
        convert = [*python, "train.convert", f"gguf={gguf}", f"adapter={adapter}"]
        result.append(Part("convert", 150, [*convert, f"out={model}"]))
        sets = ",".join(["humaneval", *(f"'{path}'" for path in prompts)])
        for dtype, count in (("bfloat16", 8), ("float32", 4)):
            bench = [*python, "infer.bench", f"model={model}", "part=speed"]
            bench += [f"prompts=[{sets}]", f"count={count if ON_GPU else 1}"]
            bench += ["speed.decoders=[hybrid,adaptive,sdsat,ngrams]", "speed.k=[5]"]
            bench += ["speed.peers=[]", "speed.rounds=1", f"dtype={dtype}"]
            bench += [f"speed.max_new_tokens={128 if ON_GPU else 16}"]
            bench += [f"out={out / f'speed_{dtype}'}"]
            result.append(Part(f"speed_{dtype}", 130, bench))
    result.append(Part("rows", 80, [*figures, "--part", "rows"]))
    result += [Part(name, 70, [*figures, "--part", name]) for name in RECIPES]
    zero = [*python, "pytest", "-q", "-s", "-m", "gpu", "-p", "no:cacheprovider"]
    tests = ["zero_stages_agree"]
    tests += [f"steps_and_resume[zero{stage}-branch]" for stage in (3, 2, 1)]
    zero += [f"tests/gpu/test_training.py::test_{name}" for name in tests]
    result.append(Part("zero", 240, zero))
    return result


def run(part: Part, out: Path, seconds: float) -> None:
    """Run a part with its output in OUT/NAME.log; print its exit code, seconds and last output."""
    began = time.monotonic()
    if seconds < 10:
        print(f"{part.name}: no time left", flush=True)
        return
    log = out / f"{part.name}.log"
    with log.open("w") as file:
        try:
            ended: int | str = subprocess.run(
                part.command, stdout=file, stderr=file, timeout=seconds, cwd=ROOT
            ).returncode
        except subprocess.TimeoutExpired:
            ended = "time limit"
    elapsed = time.monotonic() - began
    print(f"\n== {part.name}: ended with {ended} after {elapsed:.0f} s", flush=True)
    print(log.read_text(errors="replace")[-3000:], flush=True)


def measure_rows(model: Path, out: Path) -> None:
    """Write the cost of rows for the 7B shape, and for SmolLM2 if its directory exists."""
    from infer import load
    from infer.bench.roofline import measure_roofline

    figures: dict[str, Any] = {}

    def measure(name: str, make: Callable[[], Any]) -> None:
        lm = make()
        row = measure_roofline(lm, rows=ROWS)
        row["L"] = [ms / row["ms"][0] for ms in row["ms"]]
        row["roofline_share"] = [b / ms for b, ms in zip(row["roofline_ms"], row["ms"])]
        figures[name] = row
        print(name, json.dumps(row), flush=True)
        write_json(out, figures)

    if model.is_dir():
        for dtype in ("bfloat16", "float32"):
            measure(f"smollm2 {dtype}", lambda d=dtype: load(model, d).lm)
    shape = CODELLAMA_7B if ON_GPU else LIVELY
    measure(
        "codellama_7b bfloat16",
        lambda: random_model(shape, dtype=torch.bfloat16, device=DEVICE),
    )


def measure_step(recipe: list[str]) -> dict[str, Any]:
    """Return the figures of a recipe's training step, with as many layers as fit by the plan."""
    from tests.gpu.training_worker import Steps
    from train.flops import peak_flops
    from train.spec import estimate_memory, read_spec

    common = ["dtype=bfloat16", "model.random_init=true", "global_batch=1"]
    common += ["deepspeed=zero1", "micro_batch=1", "tracker.mode=disabled"]
    # Without data, the estimates are for the context.
    common += [f"model.shape.max_position_embeddings={TOKENS}"]
    common += ["objective.L=5", "data.path=x", "out=x"]
    capacity = torch.cuda.get_device_properties(0).total_memory if ON_GPU else 64 * GIB
    for layers in (32, 24, 16, 8, 4) if ON_GPU else (2,):
        overrides = [*recipe, *common, f"model.shape.num_hidden_layers={layers}"]
        config = Steps.config_of(TOKENS, overrides)
        spec = read_spec(config, None)
        plan = estimate_memory(spec, config, ranks=1)
        if plan.total < MEMORY_SHARE * capacity:
            break
    with torch.device(DEVICE):  # drawing 7B weights on a CPU would take minutes
        steps = Steps(TOKENS, overrides)
    seconds = []
    for index in range(2 + STEPS):
        began = time.perf_counter()
        loss = steps.step(index)  # this waits for the device
        seconds.append(time.perf_counter() - began)
    figures = {
        "layers": layers,
        "tokens": TOKENS,
        "seconds": median(seconds[2:]),
        "loss": loss,
        "peak_gib": steps.engine.peak_memory() / GIB,
        "planned_gib": plan.total / GIB,
    }
    peak = peak_flops(torch.cuda.get_device_name()) if ON_GPU else None
    if peak:
        figures["mfu"] = spec.flops / figures["seconds"] / peak
    return figures


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
