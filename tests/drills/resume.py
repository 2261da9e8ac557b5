"""Kill -9 at a random step, start again: `python -m tests.drills.resume DATA FOLDER [VARIANT ...]`.

DATA is a finished folder of data_prep with small sequences. Every variant runs on one rank and on two
by the user's command: whole; killed at a random step and started again on as many ranks; and the same
killed run started again on the other number. The table says by how much any step's loss differs from
the whole run's: 0 is equality to the last bit.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.train.resume_worker import RECIPE

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY = 24, 5
FLOAT32, BFLOAT16 = "deepspeed.bf16.enabled=false", "deepspeed.bf16.enabled=true"
VARIANTS = {
    **{f"zero{stage}": [f"deepspeed=zero{stage}", FLOAT32] for stage in range(4)},
    **{f"zero{stage} bf16": [f"deepspeed=zero{stage}", BFLOAT16] for stage in range(4)},
    **{f"zero{stage} offload": [f"deepspeed=zero{stage}_offload", FLOAT32] for stage in (2, 3)},
}


def start(out: Path, data: str, variant: str, ranks: int) -> subprocess.Popen[str]:
    """The user's command, in a process group of its own."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    settings = [*RECIPE, *VARIANTS[variant], f"steps={STEPS}", f"save_every={SAVE_EVERY}"]
    arguments = [sys.executable, *launch, "-m", "train", *settings, f"data.path={data}", f"out={out}"]
    with open(f"{out}.log", "a") as log:
        return subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=log, text=True, start_new_session=True)


def finish(run: subprocess.Popen[str], out: Path) -> None:
    """Wait for a run that must end well."""
    if run.wait():
        raise SystemExit(f"{out}: ended with code {run.returncode}: see {out}.log")


def losses(out: Path) -> list[float]:
    """Of every step that the log has in full."""
    path = out / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def kill_at(run: subprocess.Popen[str], out: Path, step: int) -> int:
    """Kill all of a run once it has done some steps; returns how many it had logged."""
    while len(losses(out)) < step:
        if run.poll() is not None:
            raise SystemExit(f"{out}: ended before step {step}: see {out}.log")
        time.sleep(0.002)
    for process in Path("/proc").glob("[0-9]*"):  # torchrun's ranks have sessions of their own
        try:
            if f"out={out}".encode() in (process / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue
    run.wait()
    return len(losses(out))


def difference(one: list[float], other: list[float]) -> str:
    """The largest difference of any step, or that the steps are not the same."""
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} steps"
    return f"{max(abs(a - b) for a, b in zip(one, other)):.1e}".replace("0.0e+00", "0")


def drill(folder: Path, data: str, variant: str, ranks: int, chance: random.Random) -> str:
    """One row of the table."""
    name = f"{variant.replace(' ', '-')}-{ranks}"
    whole, same, other = (folder / f"{name}-{kind}" for kind in ("whole", "same", "other"))
    finish(start(whole, data, variant, ranks), whole)
    at = kill_at(start(same, data, variant, ranks), same, chance.randint(SAVE_EVERY + 1, STEPS - 4))
    begun = sorted(path.name for path in (same / "checkpoints").glob("step-*"))
    shutil.copytree(same, other)
    finish(start(same, data, variant, ranks), same)
    finish(start(other, data, variant, 3 - ranks), other)
    wanted = losses(whole)
    row = [variant, ranks, at, begun[-1], difference(losses(same), wanted), difference(losses(other), wanted)]
    return "{:15} {:5} {:>10} {:>12} {:>12} {:>14}".format(*row)


def main() -> None:
    """Print the table row by row."""
    data, folder, *variants = sys.argv[1:]
    Path(folder).mkdir(parents=True)
    chance = random.Random()
    print("variant         ranks  killed at  resumed from   same ranks    other ranks", flush=True)
    for variant in variants or VARIANTS:
        for ranks in (2, 1):
            print(drill(Path(folder).resolve(), data, variant, ranks, chance), flush=True)


if __name__ == "__main__":
    main()
