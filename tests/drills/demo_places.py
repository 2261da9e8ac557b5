"""The demo in hostile surroundings: one core, 4 GB, no network, no home, a path with spaces and umlauts.

    python -m tests.drills.demo_places FOLDER [ordinary one-core memory offline homeless no-home umlauts ...]
        [--like DEMO] [--short]

Each word is a run of launch/demo.sh in a clone of this checkout's last commit below FOLDER; words joined by +
are one run in all of them: offline+homeless+umlauts. With umlauts the clone has a new environment of its own,
installed before anything else; in the others this one's is linked. --short has all of the demo's stages with
few steps and prompts.

Prints code, time, the most memory that all processes held at once and in which stage, by a memory cgroup (of
version 1), and what differs from the finished demo DEMO, without one from that of the first run: losses of
every step, shards, weights. Needs root. On one core one rank trains instead of two: its sums are rounded
otherwise, so its losses differ. The last line is JSON.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.drills.hostile import NOBODY, ROOT, enter_namespace, environment, open_interpreter

CGROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 4 * 10**9  # bytes
NAME = "Übung mit Leerzeichen/adaptive tokens ßø"
SHORT = """
bash launch/setup.sh && source .venv/bin/activate && export OMP_NUM_THREADS=1
ranks=$(python -c 'import os; print(min(2, len(os.sched_getaffinity(0))))') out=runs/demo data=runs/demo/data
train() {
    torchrun --standalone --nproc_per_node "$ranks" -m train "$@" data.path=$data steps=20 save_every=20 \\
        validate_every=20 validate_sequences=8 optimizer.warmup_steps=5
}
python -m data_prep experiment=demo out=$data
train experiment=demo_base out=$out/base
python -m train.export checkpoint=$out/base out=$out/base/model_directory
train experiment=demo model.path=$out/base/model_directory out=$out/tuned
train experiment=demo_draft out=$out/draft_training
python -m train.export checkpoint=$out/tuned out=$out/model
python -m train.export checkpoint=$out/draft_training out=$out/draft
RANKS=1 bash launch/evaluate.sh $out/model $out/base/model_directory out=$out/report \\
    speed.experiment=demo speed.draft=$out/draft speed.prompts.held_out.path=$data/held_out.jsonl \\
    quality.experiment=demo quality.benchmarks.held_out.path=$data/held_out.jsonl \\
    speed.prompts.held_out.count=1 speed.prompts.humaneval.count=1 speed.rounds=1 speed.k=[3] \\
    speed.temperatures=[0] speed.peers=[generate] quality.benchmarks.humaneval.count=1 \\
    quality.benchmarks.held_out.count=1 max_new_tokens=16
"""
DEMO = "runs/demo"
PLACES = ("ordinary", "one-core", "memory", "offline", "homeless", "no-home", "umlauts")
LOOPBACK = "import fcntl,socket,struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 1))"


class Group:
    """A memory cgroup that a run is put into, watched while the run lasts."""

    def __init__(self, limit: int | None) -> None:
        self.folder = CGROUPS / f"demo-places-{os.getpid()}"
        self.folder.mkdir()
        self.peaks: dict[str, int] = {}
        if limit:
            (self.folder / "memory.limit_in_bytes").write_text(str(limit))

    def watch(self, run: subprocess.Popen[bytes]) -> None:
        """Until it ends; what its processes hold at most, by stage, less the files that the kernel keeps."""
        while run.poll() is None:
            lines = (self.folder / "memory.stat").read_text().splitlines()
            held = next(int(line.split()[1]) for line in lines if line.startswith("total_rss "))
            for stage in self._stages():
                self.peaks[stage] = max(self.peaks.get(stage, 0), held)
            time.sleep(0.3)

    def _stages(self) -> set[str]:
        """Which modules run in it, with the last part of what they write."""
        found = set()
        for pid in (self.folder / "cgroup.procs").read_text().split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            except OSError:
                continue
            outs = [word.rpartition("/")[2] for word in words if word.startswith("out=")]
            if "-m" in words and outs:
                modules = [word for before, word in zip(words, words[1:]) if before == "-m"]
                found.add(f"{modules[-1]} {outs[-1]}")
        return found or {"setup"}

    def close(self) -> int:
        """How often the limit was met."""
        count = int((self.folder / "memory.failcnt").read_text())
        for _ in range(50):  # its last processes may be ending
            try:
                self.folder.rmdir()
                break
            except OSError:
                time.sleep(0.2)
        return count


def place_of(folder: Path, places: Sequence[str]) -> Path:
    """The clone."""
    return folder / "+".join(places) / (NAME if "umlauts" in places else "adaptive-tokens")


def checkout(folder: Path, places: Sequence[str]) -> Path:
    """A clone of the last commit, with an environment; owned by the user without rights who is to run it."""
    clone = place_of(folder, places)
    if clone.is_dir():  # of an earlier run, with its environment
        shutil.rmtree(clone / "runs", ignore_errors=True)
        trusted = ["git", "-c", f"safe.directory={clone}", "-C", clone]
        subprocess.run([*trusted, "pull", "--quiet", "--ff-only"], check=True)
    else:
        clone.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    if "umlauts" in places:
        subprocess.run(["bash", clone / "launch" / "setup.sh"], check=True)
    elif not (clone / ".venv").exists():
        (clone / ".venv").symlink_to((ROOT / ".venv").resolve())
    if _user(places):
        subprocess.run(["chown", "--recursive", "--no-dereference", str(NOBODY), clone], check=True)
    return clone


def _user(places: Sequence[str]) -> int:
    return NOBODY if {"homeless", "no-home"} & set(places) else 0


def command(places: Sequence[str], script: Sequence[str], group: Group) -> list[str]:
    """The script in these surroundings, the outermost first."""
    found = ["bash", "-c", f'echo $$ > "{group.folder}/cgroup.procs" && exec "$@"', "bash"]
    if "offline" in places:
        inner = f'{sys.executable} -c "{LOOPBACK}" && exec "$@"'
        found += ["unshare", "--net", "bash", "-c", inner, "bash"]
    if "one-core" in places:
        found += ["taskset", "--cpu-list", "0"]
    if user := _user(places):
        found += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return [*found, *script]


def surrounded(folder: Path, places: Sequence[str], like: Path | None, *, short: bool) -> dict[str, Any]:
    """One run, and what came of it."""
    clone, home = checkout(folder, places), folder / "home"
    home.mkdir(mode=0o755, exist_ok=True)  # root's: "homeless" cannot write it
    env = environment(Path("") if "no-home" in places else home)
    script = ["bash", "-euo", "pipefail", "-c", SHORT] if short else ["bash", "launch/demo.sh"]
    group, began = Group(LIMIT if "memory" in places else None), time.monotonic()
    with open(clone.parent / "demo.log", "wb") as log:
        run = subprocess.Popen(command(places, script, group), cwd=clone, env=env, stdout=log, stderr=log)
        group.watch(run)
    seconds = time.monotonic() - began
    told = (clone.parent / "demo.log").read_text(errors="replace").splitlines()[-12:]
    peaks = {stage: round(held / 2**30, 2) for stage, held in group.peaks.items()}
    return {
        "code": run.returncode,
        "minutes": round(seconds / 60, 1),
        "peak_gib": max(peaks.values(), default=0),
        "peaks_gib": peaks,
        "limit_met": group.close(),
        "same": compared(clone / DEMO, like) if like else {},
        "told": told if run.returncode else told[-1:],
    }


def compared(demo: Path, like: Path) -> dict[str, str]:
    """What there is in both: whether it is the same, and how far losses are apart where it is not."""
    found = {}
    for path in sorted([*like.glob("data/*.npy"), *like.glob("*/model.safetensors")]):
        own = demo / path.relative_to(like)
        if own.is_file():
            alike = _hash(own) == _hash(path)
            found[str(path.relative_to(like))] = "same" if alike else "another"
    for path in sorted(like.glob("*/log.jsonl")):
        own = demo / path.relative_to(like)
        if own.is_file():
            pairs = list(zip(_losses(own), _losses(path)))
            most = max((abs(a - b) for a, b in pairs), default=0.0)
            found[str(path.relative_to(like))] = f"{len(pairs)} steps, losses differ by at most {most:.1e}"
    return found


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="*", default=["one-core", "memory", "offline", "homeless", "umlauts"])
    parser.add_argument("--like", type=Path)
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    for run in args.runs:
        if unknown := set(run.split("+")) - set(PLACES):
            parser.error(f"wanted some of {', '.join(PLACES)}, found {', '.join(unknown)}")
    if os.geteuid() or not (CGROUPS / "memory.stat").is_file():
        raise SystemExit("demo_places: skipped: it needs root, and memory cgroups of version 1")
    enter_namespace("tests.drills.demo_places")
    open_interpreter()
    folder, report = args.folder.resolve(), dict[str, Any]()
    for run in args.runs:
        like = args.like or (place_of(folder, args.runs[0].split("+")) / DEMO if report else None)
        report[run] = surrounded(folder, run.split("+"), like, short=args.short)
        print(run, json.dumps(report[run], indent=1, ensure_ascii=False), flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
