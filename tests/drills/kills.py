"""kill -9 of every stage, then the same command again: the result must be that of an undisturbed run.

    python -m tests.drills.kills FOLDER [STAGE ...] [--kills 20] [--when moment late write] [--seed 0]

Every stage (stages.py) runs once undisturbed. Then it is killed, one to three times in a row, and run to its
end, until it was killed often enough. A kill comes at a random moment of the run, in its last tenth, or at a
random one of its writes (killer/sitecustomize.py). It hits all processes, the first one, or one child. After
each kill nothing incomplete is visible (results.py) and no process goes on.

In the end the folder equals that of the undisturbed run, file for file. FOLDER keeps the undisturbed results
and what was wrong. The last line is JSON; the exit code is 1 where something was wrong.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.drills.results import differences, hashes, incomplete
from tests.drills.stages import STAGES, Stage

ROOT = Path(__file__).parents[2]
KILLER = Path(__file__).parent / "killer"
AFTER_ALL, AFTER_ONE = 30.0, 100.0  # seconds until the others are gone; a silent rank is missed after 40
VICTIMS = ("all", "all", "main", "one")
WHEN = ("moment", "late", "write", "write")
BUSY = "another run is writing it"


@dataclass
class Reference:
    """An undisturbed run: its time, its number of writes, and hashes of its result."""

    seconds: float
    writes: int
    hashes: dict[str, str]

    @property
    def patience(self) -> float:
        return 10 * self.seconds + 120


@dataclass
class Outcome:
    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    busy: int = 0  # runs that were refused while processes of the one before ended
    slowest: float = 0.0  # seconds until the last process was gone, where not all were hit
    faults: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)


class Command:
    """The command of a stage, which runs again and again in one folder."""

    def __init__(self, stage: Stage, folder: Path, when: Sequence[str] = WHEN) -> None:
        self.stage, self.folder, self.when = stage, folder, when
        self.run, self.temporary = folder / "run" / stage.name, folder / "tmp" / stage.name
        self.log, self.count = folder / f"{stage.name}.log", folder / f"{stage.name}.writes"
        self.temporary.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self.run.mkdir(parents=True)
        if self.stage.begin:
            self.stage.begin(self.folder / "whole", self.run)

    def start(self, *, at: int = 0, delay: float = 0.0) -> psutil.Popen:
        for path in (self.count, Path(f"{self.count}.struck")):
            path.unlink(missing_ok=True)
        ranks = self.stage.ranks
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
        arguments = self.stage.arguments(self.folder / "whole", self.run)
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": KILLER}
        environment |= {"TMPDIR": self.temporary, "XDG_CACHE_HOME": self.folder / "cache"}
        environment |= {"KILL_BELOW": self.run, "KILL_COUNT": self.count, "KILL_AT": at, "KILL_DELAY": delay}
        with open(self.log, "a") as log:
            return psutil.Popen(
                [sys.executable, "-m", *(torchrun if ranks > 1 else ()), *arguments],
                cwd=ROOT,
                env=os.environ | {name: str(value) for name, value in environment.items()},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, run: psutil.Popen, seconds: float) -> bool:
        """Wait for the moment to kill a run, or for its death at a write; return False where it ends before."""
        moment, struck = time.monotonic() + seconds, Path(f"{self.count}.struck")
        while run.poll() is None and time.monotonic() < moment and not struck.exists():
            time.sleep(0.005)
        return run.poll() is None or struck.exists()

    def finish(self, patience: float) -> str:
        """Run it to its end; return an error with the last output, empty where it ended well."""
        run, before = self.start(), self.log.stat().st_size if self.log.exists() else 0
        try:
            code = run.wait(patience)
        except psutil.TimeoutExpired:
            kill([*self.processes(), run])
            return f"no end after {patience:.0f} s"
        output = self.log.read_bytes()[before:].decode(errors="replace").strip()
        return f"code {code}: {output[-300:]}" if code else ""

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of this run, whoever started them."""
        got = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("KILL_COUNT") == str(self.count)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    got.append(process)
            except psutil.Error:
                continue
        return got


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def reference(name: str, folder: Path) -> Reference:
    """Run a stage undisturbed, after those that it needs; or read what an earlier drill kept."""
    for needed in STAGES[name].needs:
        reference(needed, folder)
    command, whole = Command(STAGES[name], folder), folder / "whole" / name
    record = whole / "whole.json"
    if not record.is_file():
        command.clear()
        start = time.monotonic()
        if error := command.finish(1800):
            raise SystemExit(f"{name}: the undisturbed run ended with {error}")
        seconds = time.monotonic() - start
        got = Reference(seconds, command.count.stat().st_size, hashes(command.stage, command.run))
        shutil.rmtree(whole, ignore_errors=True)
        whole.parent.mkdir(exist_ok=True)
        shutil.copytree(command.run, whole)
        record.write_text(json.dumps(vars(got)))
    return Reference(**json.loads(record.read_text()))


def strike(command: Command, whole: Reference, rng: random.Random, outcome: Outcome) -> bool:
    """Start the command, kill it, and check what is left; return False where it ended before."""
    when, victim = rng.choice(command.when), rng.choice(VICTIMS)
    at = rng.randint(1, whole.writes) if when == "write" else 0
    run = command.start(at=at, delay=rng.choice((0.0, 0.0, 0.002 * rng.random())))
    seconds = whole.seconds * rng.uniform(0.9 if when == "late" else 0.0, 1.0)
    if not command.wait(run, whole.patience if at else seconds):
        if run.returncode:
            outcome.faults.append(f"{when}: ended by itself with code {run.returncode}")
        return False
    ours, others, direct = command.processes(), children(run), children(run, recursive=False)
    # No program under judgement, whose death would be a verdict.
    own = [process for process in others if process in ours or process in direct]
    victims = {"all": [run, *ours, *others], "main": [run], "one": [rng.choice(own)] if own else [run]}[victim]
    kill(victims if victim == "all" or not at else [])  # at a write its process is dead
    outcome.kills[f"{when} {victim}"] += 1
    start = time.monotonic()
    if at_once := victim == "main" and rng.random() < 0.5:
        error = command.finish(whole.patience)  # ends well, or says that others are still there
        outcome.busy += BUSY in error
        outcome.faults += [f"started at once: {error}"] if error and BUSY not in error else []
    limit = AFTER_ALL if victim == "all" else AFTER_ONE
    _, left = psutil.wait_procs([run, *ours, *others], limit)
    _, unseen = psutil.wait_procs(command.processes(), limit)  # begun between the look and the kill
    if left := [*left, *unseen]:
        outcome.faults.append(f"{when} {victim}: {', '.join(map(str, left))} went on")
        kill(left)
        psutil.wait_procs(left, AFTER_ALL)
    elif victim != "all" and not at_once:
        outcome.slowest = max(outcome.slowest, time.monotonic() - start)
    faults = incomplete(command.stage, command.run, whole.hashes)
    outcome.faults += [f"{when} {victim} at write {at}: {fault}" for fault in faults]
    return True


def children(run: psutil.Popen, *, recursive: bool = True) -> list[psutil.Process]:
    try:
        return run.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def drill(command: Command, whole: Reference, kills: int, rng: random.Random) -> Outcome:
    outcome = Outcome()
    while outcome.kills.total() < kills:
        command.clear()
        outcome.runs += 1
        before = len(outcome.faults)
        for _ in range(rng.choice((1, 1, 2, 3))):
            if not strike(command, whole, rng, outcome):
                break
        if error := command.finish(whole.patience):
            outcome.faults.append(f"the last run: {error}")
        actual = hashes(command.stage, command.run)
        outcome.faults += [f"in the end: {item}" for item in differences(actual, whole.hashes)]
        if len(outcome.faults) > before:
            shutil.copytree(command.run, command.folder / "wrong" / f"{command.stage.name}-{outcome.runs}")
    outcome.temporary = sorted(path.name for path in command.temporary.iterdir())
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--when", nargs="+", choices=sorted(set(WHEN)), default=WHEN)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder, results = args.folder.resolve(), dict[str, Any]()
    for name in args.stages or STAGES:
        whole = reference(name, folder)
        command = Command(STAGES[name], folder, args.when)
        outcome = drill(command, whole, args.kills, random.Random(f"{args.seed} {name}"))
        results[name] = vars(outcome) | {"seconds": whole.seconds, "writes": whole.writes}
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.kills.items()))
        print(
            f"{name:14} {outcome.kills.total()} kills in {outcome.runs} runs of {whole.seconds:.0f} s and "
            f"{whole.writes} writes ({kinds}): {len(outcome.faults)} faults; the last process gone after "
            f"{outcome.slowest:.1f} s; {outcome.busy} refused meanwhile; {len(outcome.temporary)} in TMPDIR",
            *outcome.faults,
            sep="\n    ",
            flush=True,
        )
    print(json.dumps(results))
    sys.exit(any(result["faults"] for result in results.values()))


if __name__ == "__main__":
    main()
