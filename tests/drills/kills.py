"""kill -9 of every stage at random moments, and the same command again: the result of a run in peace is wanted.

    python -m tests.drills.kills FOLDER [STAGE ...] [--kills 20] [--when moment late write] [--seed 0]

Every stage (stages.py) runs once undisturbed, by its command; then it is killed until it has been so often
enough, one to three times in a row, and run to its end. A kill comes at a moment of the whole run or in its
last tenth, or right before or shortly after a write that is chosen among all of the run's
(killer/sitecustomize.py). It hits all processes, the first alone, or one of its children. After each:

    nothing is visible that is not whole: files can be read, and are already those of the result; folders with a
    manifest lack nothing; those whose stage makes them in one step are not there without one
    no process is left that goes on, after a time that is told where not all were hit

At the end there is what the undisturbed run left, file for file, and nothing else: no temporary ones. What is
left over in TMPDIR is told. FOLDER keeps the whole results, for the next time, and what was found wrong. The
last line is JSON.
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

from tests.drills.facts import difference, facts_of, not_whole
from tests.drills.stages import STAGES, Stage

ROOT = Path(__file__).parents[2]
KILLER = Path(__file__).parent / "killer"
AFTER_ALL, AFTER_ONE = 30.0, 100.0  # seconds in which the others must be gone; a silent rank is missed after 40
WHOM = ("all", "all", "main", "one")
WHEN = ("moment", "late", "write", "write")
BUSY = "another run is writing it"


@dataclass
class Whole:
    """An undisturbed run: how long it took, its writes, and what it left."""

    seconds: float
    writes: int
    facts: dict[str, str]


@dataclass
class Found:
    """What came of a stage's kills."""

    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    busy: int = 0  # runs that were refused while processes of the one before were ending
    slowest: float = 0.0  # seconds until the last process was gone, where not all were hit
    faults: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)


class Command:
    """A stage's command, as it is started again and again in one folder."""

    def __init__(self, stage: Stage, folder: Path, when: Sequence[str] = WHEN) -> None:
        self.stage, self.folder, self.when = stage, folder, when
        self.run, self.temporary = folder / "run" / stage.name, folder / "tmp" / stage.name
        self.log, self.count = folder / f"{stage.name}.log", folder / f"{stage.name}.writes"
        self.temporary.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Begin anew."""
        shutil.rmtree(self.run, ignore_errors=True)
        self.run.mkdir(parents=True)
        if self.stage.begin:
            self.stage.begin(self.folder / "whole", self.run)

    def start(self, *, at: int = 0, delay: float = 0.0) -> psutil.Popen:
        """The user's command; `at`: the write at which it is to die."""
        for path in (self.count, Path(f"{self.count}.struck")):
            path.unlink(missing_ok=True)
        ranks = self.stage.ranks
        launch = (
            ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else []
        )
        words = self.stage.words(self.folder / "whole", self.run)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": str(KILLER),
            "KILL_BELOW": str(self.run),
            "KILL_COUNT": str(self.count),
            "KILL_AT": str(at),
            "KILL_DELAY": str(delay),
        }
        with open(self.log, "a") as log:
            return psutil.Popen(
                [sys.executable, "-m", *launch, *words],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def reached(self, run: psutil.Popen, seconds: float) -> bool:
        """Wait for the moment to kill a run, or for its death at a write; False where it ends before."""
        moment, struck = time.monotonic() + seconds, Path(f"{self.count}.struck")
        while run.poll() is None and time.monotonic() < moment and not struck.exists():
            time.sleep(0.005)
        return run.poll() is None or struck.exists()

    def finish(self, patience: float) -> int | str:
        """Run it to its end; the exit code, or the last thing that it said where that is not 0."""
        run, before = self.start(), self.log.stat().st_size if self.log.exists() else 0
        try:
            code = run.wait(patience)
        except psutil.TimeoutExpired:
            end([*self.processes(), run])
            return f"no end after {patience:.0f} s"
        told = self.log.read_bytes()[before:].decode(errors="replace").strip()
        return code and f"code {code}: {told[-300:]}"

    def processes(self) -> list[psutil.Process]:
        """Those of this run that live, whosever children they are."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("KILL_COUNT") == str(self.count)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def end(processes: list[psutil.Process]) -> None:
    """kill -9."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def whole(command: Command) -> Whole:
    """The undisturbed run, made now or kept from an earlier drill."""
    kept = command.folder / "whole" / command.stage.name
    record = kept / "whole.json"
    if not record.is_file():
        command.clear()
        began = time.monotonic()
        if told := command.finish(1800):
            raise SystemExit(f"{command.stage.name}: the undisturbed run ended with {told}")
        seconds = time.monotonic() - began
        found = Whole(seconds, command.count.stat().st_size, facts_of(command.stage, command.run))
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(exist_ok=True)
        shutil.copytree(command.run, kept)
        record.write_text(json.dumps(vars(found)))
    return Whole(**json.loads(record.read_text()))


def made(name: str, folder: Path) -> Whole:
    """The same of a stage by its name, behind those that it needs."""
    for one in STAGES[name].needs:
        made(one, folder)
    return whole(Command(STAGES[name], folder))


def strike(command: Command, wanted: Whole, chance: random.Random, found: Found) -> bool:
    """Start it and kill it; False where it came to its end before. What is left over then is looked at."""
    when, whom = chance.choice(command.when), chance.choice(WHOM)
    at = chance.randint(1, wanted.writes) if when == "write" else 0
    run = command.start(at=at, delay=chance.choice((0.0, 0.0, 0.002 * chance.random())))
    seconds = wanted.seconds * chance.uniform(0.9 if when == "late" else 0.0, 1.0)
    if not command.reached(run, patience(wanted) if at else seconds):
        if run.returncode:
            found.faults.append(f"{when}: ended by itself with code {run.returncode}")
        return False
    ours, others, direct = command.processes(), below(run), below(run, recursive=False)
    # One: no program that is judged, whose verdict such a death would be.
    one = [process for process in others if process in ours or process in direct]
    victims = {"all": [run, *ours, *others], "main": [run], "one": [chance.choice(one)] if one else [run]}[whom]
    end(victims if whom == "all" or not at else [])  # at a write its process is dead
    found.kills[f"{when} {whom}"] += 1
    began = time.monotonic()
    if impatient := whom == "main" and chance.random() < 0.5:
        at_once(command, wanted, found)
    limit = AFTER_ALL if whom == "all" else AFTER_ONE
    _, left = psutil.wait_procs([run, *ours, *others], limit)
    _, unseen = psutil.wait_procs(command.processes(), limit)  # begun between the look and the kill
    if left := [*left, *unseen]:
        found.faults.append(f"{when} {whom}: {', '.join(map(str, left))} went on")
        end(left)
        psutil.wait_procs(left, AFTER_ALL)
    elif whom != "all" and not impatient:
        found.slowest = max(found.slowest, time.monotonic() - began)
    faults = not_whole(command.stage, command.run, wanted.facts)
    found.faults += [f"{when} {whom} at write {at}: {fault}" for fault in faults]
    return True


def patience(wanted: Whole) -> float:
    """Seconds after which a run hangs."""
    return 10 * wanted.seconds + 120


def below(run: psutil.Popen, *, recursive: bool = True) -> list[psutil.Process]:
    """The processes that a run has started, and those that these have."""
    try:
        return run.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def at_once(command: Command, wanted: Whole, found: Found) -> None:
    """The same command while others of the run that was killed may live: it ends well, or is told of them."""
    told = command.finish(patience(wanted))
    if told and BUSY in str(told):
        found.busy += 1
    elif told:
        found.faults.append(f"started at once after the first process was killed: {told}")


def drill(command: Command, wanted: Whole, kills: int, chance: random.Random) -> Found:
    """Kill a stage so often, and see what comes of it."""
    found = Found()
    while found.kills.total() < kills:
        command.clear()
        found.runs += 1
        before = len(found.faults)
        for _ in range(chance.choice((1, 1, 2, 3))):
            if not strike(command, wanted, chance, found):
                break
        if told := command.finish(patience(wanted)):
            found.faults.append(f"the last run: {told}")
        facts = facts_of(command.stage, command.run)
        found.faults += [f"in the end: {one}" for one in difference(facts, wanted.facts)]
        if len(found.faults) > before:
            shutil.copytree(command.run, command.folder / "wrong" / f"{command.stage.name}-{found.runs}")
    found.temporary = sorted(path.name for path in command.temporary.iterdir())
    return found


def told(stage: Stage, found: Found, wanted: Whole) -> str:
    """One line."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kills.items()))
    return (
        f"{stage.name:14} {found.kills.total()} kills in {found.runs} runs of {wanted.seconds:.0f} s and "
        f"{wanted.writes} writes ({kinds}): {len(found.faults)} faults; the last process gone after "
        f"{found.slowest:.1f} s; {found.busy} refused meanwhile; {len(found.temporary)} left in TMPDIR"
    )


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
        command, wanted = Command(STAGES[name], folder, args.when), made(name, folder)
        found = drill(command, wanted, args.kills, random.Random(f"{args.seed} {name}"))
        print(told(STAGES[name], found, wanted), *found.faults, sep="\n    ", flush=True)
        results[name] = vars(found) | {"seconds": wanted.seconds, "writes": wanted.writes}
    print(json.dumps(results))
    sys.exit(any(result["faults"] for result in results.values()))


if __name__ == "__main__":
    main()
