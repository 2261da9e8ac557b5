"""The most memory that an export takes above what its libraries do, beside the largest shard it writes.

    python -m tests.benchmarks.export_memory [FOLDER [ROW ...]]

Trains one step of a random model of several hundred megabytes (FOLDER keeps the training folder for
another time), then exports it as ROWS say, in a process of its own. Measured is that process's highest
resident memory (VmHWM), in which the pages of mapped files count; the libraries' own is that of the same
export of a model of one tiny layer. The last line is JSON.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MB = 10**6
SHAPE = {
    "vocab_size": 2000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
TINY = SHAPE | {"hidden_size": 128, "intermediate_size": 16, "num_hidden_layers": 1}
SHAPES = {"small": TINY, "large": SHAPE}
KINDS = {"zero1": ["deepspeed=zero1"], "lora": ["deepspeed=zero1", "lora.rank=8"]}
ROWS = [  # training, dtype, shard_size, verify
    ("zero1", "float32", "150MB", "false"),
    ("zero1", "float32", "150MB", "true"),
    ("zero1", "bfloat16", "75MB", "false"),
    ("zero1", "bfloat16", "75MB", "true"),
    ("lora", "float32", "150MB", "true"),
]
TRAIN = [
    "experiment=demo",
    "model=demo",
    "steps=1",
    "save_every=1",
    "validate_every=1",
    "validate_sequences=4",
    "global_batch=1",
    "micro_batch=1",
    "optimizer.warmup_steps=0",
    "tracker.mode=disabled",
    "memory_check=false",
]
DATA = [
    "vocab=demo",
    "workers=1",
    f"data.path={sysconfig.get_path('stdlib')}",
    "data.include=[json/*.py,email/*.py]",
    "vocab.train_size=2000",
    "seq_len=128",
    "held_out=0.2",
]
# Runs an entry, then tells its own highest resident memory.
TOLD = """
import runpy, sys
runpy.run_module(sys.argv.pop(1), run_name="__main__")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def run(module: str, *arguments: object) -> int:
    """The highest resident memory of a command, in bytes."""
    command = [sys.executable, "-c", TOLD, module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return int(done.stdout.splitlines()[-1]) * 1024


def trained(folder: Path, name: str, shape: dict[str, int], *overrides: str) -> Path:
    """A finished training folder, made unless it is there."""
    data, out = folder / "data", folder / name
    if not (data / "manifest.json").is_file():
        run("data_prep", *DATA, f"out={data}")
    if not (out / "manifest.json").is_file():
        fields = [f"model.shape.{field}={value}" for field, value in shape.items() if field != "vocab_size"]
        run("train", *TRAIN, *fields, *overrides, f"data.path={data}", f"out={out}")
    return out


def measure(folder: Path, row: tuple[str, str, str, str]) -> dict[str, Any]:
    """The figures of one way to export."""
    kind, *values = row
    settings = [
        f"{name}={value}" for name, value in zip(("dtype", "shard_size", "verify"), values, strict=True)
    ]
    small, large = (trained(folder, f"{kind}-{size}", shape, *KINDS[kind]) for size, shape in SHAPES.items())
    with tempfile.TemporaryDirectory(dir=folder) as out:
        own = run("train.export", f"checkpoint={small}", f"out={out}/small", *settings)
        peak = run("train.export", f"checkpoint={large}", f"out={out}/large", *settings)
        shard = max(path.stat().st_size for path in Path(out).glob("large/*.safetensors"))
    figures = {"shard": shard, "above": peak - own, "libraries": own, "ratio": (peak - own) / shard}
    return {"training": kind, "export": settings, **figures}


def main(folder: Path, numbers: list[int]) -> None:
    """Print the table row by row."""
    found = []
    print("training  dtype     shard_size  verify  largest shard  above libraries  ratio", flush=True)
    for number in numbers:
        row = ROWS[number]
        figures = measure(folder, row)
        found.append(figures)
        shard, above = figures["shard"] / MB, figures["above"] / MB
        told = "{:9} {:9} {:11} {:6}".format(*row)
        print(f"{told} {shard:11.0f} MB {above:13.0f} MB {figures['ratio']:6.2f}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(sys.argv[1] if sys.argv[1:] else temporary).resolve()
        main(place, [int(number) for number in sys.argv[2:]] or list(range(len(ROWS))))
