"""The most memory that an export takes above what its libraries do, beside the largest shard it writes.

    python -m tests.benchmarks.export_memory [FOLDER]

Trains one step of a random model of several hundred megabytes (FOLDER keeps the training folder for another
time), then exports it in a process of its own, with and without verifying. Measured is the process's highest
resident memory (VmHWM), in which the pages of mapped files count; the libraries' own is that of the same export
of a model of one tiny layer. The last line is JSON.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

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
TINY = SHAPE | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
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


def main(folder: Path) -> None:
    """Print a row for every way to export."""
    rows = []
    print("training    dtype     shard_size  verify   largest shard   above libraries   ratio", flush=True)
    for kind, overrides in {"zero1": ["deepspeed=zero1"], "lora": ["deepspeed=zero1", "lora.rank=8"]}.items():
        large, small = (
            trained(folder, f"{kind}-{n}", shape, *overrides) for n, shape in enumerate((SHAPE, TINY))
        )
        for dtype, size in (("float32", "150MB"), ("bfloat16", "75MB"), ("bfloat16", "5GB")):
            for verify in ("false", "true"):
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    settings = [f"dtype={dtype}", f"shard_size={size}", f"verify={verify}"]
                    own = run("train.export", f"checkpoint={small}", f"out={out}/small", *settings)
                    peak = run("train.export", f"checkpoint={large}", f"out={out}/large", *settings)
                    shard = max(path.stat().st_size for path in Path(out).glob("large/*.safetensors"))
                ratio = (peak - own) / shard
                rows.append(
                    {"training": kind, "dtype": dtype, "shard_size": size, "verify": verify, "shard": shard}
                    | {"above": peak - own, "libraries": own, "ratio": ratio}
                )
                figures = f"{shard / MB:10.0f} MB {(peak - own) / MB:14.0f} MB {ratio:8.2f}"
                print(f"{kind:11} {dtype:9} {size:11} {verify:6} {figures}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
