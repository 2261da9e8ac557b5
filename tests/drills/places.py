"""Hostile places: every stage on a full disk, in read-only folders, as another user, with a wrong clock, twice.

    python -m tests.drills.places FOLDER [--rows full ...] [--stages data_prep-2 train ...]

Every refusal must be one sentence with code 2, and leave nothing of the result. With its cause gone the same
command must end as in a good place, with the same files. FOLDER keeps what the stages (stages.py) read of one
another. Needs root, for it mounts file systems and takes another user's id, in a mount namespace of its own.
The last line is JSON.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conf.stage import MANIFEST, partial_of
from tests.drills import hostile
from tests.drills.hostile import NAMELESS, NOBODY, Result, disk, read_only, resize, used, wait
from tests.drills.kills import reference
from tests.drills.results import differences, hashes, incomplete
from tests.drills.stages import STAGES, Stage

ROOM = 2**30  # bytes of a disk that is large enough
SHARES = (0.0, 0.1, 0.4, 0.7, 0.95)  # of what a stage needs at most
SENTENCE = re.compile(r"(?:\A|\n)(error: [^\n]+)\n(  see docs/\S+\n)?\Z")  # figures may stand before it
NEGATIVE = re.compile(r"(?<![\w.-])-\d[\d.,]* (tok|s\b|ms|MB|steps)")
Row = Callable[["Trial"], Iterator[tuple[str, str]]]


@dataclass
class Trial:
    """A stage, the drill's folder, and what the stage leaves in a good place."""

    folder: Path
    stage: Stage
    expected: dict[str, str] = field(init=False)
    need: int = field(init=False)  # bytes that it takes at most

    def __post_init__(self) -> None:
        self.inputs, self.home = self.folder / "whole", self.folder / "home"
        for path in (self.inputs, self.home):
            path.mkdir(parents=True, exist_ok=True)
        for name in self.stage.needs:
            reference(name, self.folder)
        place, most, done = self.folder / "places" / "whole", [0], threading.Event()
        with disk(place, ROOM):
            self.begin(place)
            begin = used(place)

            def watch() -> None:
                while not done.wait(0.01):
                    most[0] = max(most[0], used(place))

            thread = threading.Thread(target=watch)
            thread.start()
            result = self.run(place)
            done.set()
            thread.join()
            if result.code:
                raise SystemExit(f"{self.stage.name}: code {result.code} in a good place: {result.stderr}")
            self.expected, self.need = hashes(self.stage, place), most[0] - begin

    def place(self, name: str) -> Path:
        place = self.folder / "places" / f"{name}-{self.stage.name}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        self.begin(place)
        return place

    def begin(self, place: Path) -> None:
        if self.stage.begin:
            self.stage.begin(self.inputs, place)

    def start(self, place: Path, *more: str, user: int = 0, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *self.stage.arguments(self.inputs, place), *more]
        return hostile.start(command, self.home, env, user)

    def run(self, place: Path, *more: str, user: int = 0, **env: str) -> Result:
        return wait(self.start(place, *more, user=user, **env))

    def begun(self, place: Path) -> Path:
        """Return what exists as soon as a stage writes its folder, which it locks."""
        return (
            place / self.stage.result if self.stage.name == "train" else partial_of(place / self.stage.result)
        )

    def is_under_way(self, place: Path) -> bool:
        begun = self.begun(place)
        if self.stage.name == "train":
            return (begun / "checkpoints" / "step-000003").is_dir()
        return begun.is_dir() and any(begun.iterdir())

    def until_under_way(self, process: subprocess.Popen[str], place: Path) -> None:
        """Wait until the result is half written, or the process ends."""
        while process.poll() is None and not self.is_under_way(place):
            time.sleep(0.05)

    def refused(self, place: Path, result: Result) -> str:
        """Return the sentence of a refusal, or what is wrong with it; a result without its report stays."""
        sentence = SENTENCE.search(result.stderr)
        if result.code != 2 or sentence is None or "Traceback" in result.stderr:
            return f"FAILED: code {result.code}: {(result.stderr or result.stdout)[-2000:]}"
        path = place / self.stage.result
        if path.is_file() or (path / MANIFEST).is_file():
            faults = list(incomplete(self.stage, place, self.expected))
            if self.stage.result == self.stage.out or faults:
                return f"FAILED: a result is there: {result.stderr}{', '.join(faults)}"
        return sentence[1].replace(str(place), "DIR")

    def good(self, place: Path, result: Result) -> str:
        if result.code:
            return f"FAILED: code {result.code}: {(result.stderr or result.stdout)[-2000:]}"
        if negative := NEGATIVE.search(result.stdout + result.stderr):
            return f"FAILED: {negative[0]}"
        faults = list(differences(hashes(self.stage, place), self.expected))
        return f"FAILED: {', '.join(faults)}" if faults else "as in a good place"


def full(trial: Trial) -> Iterator[tuple[str, str]]:
    """A disk that is full from the start, or after a part of what the stage writes; then there is room."""
    for share in SHARES:
        place = trial.folder / "places" / f"full-{share}"
        with disk(place, ROOM):
            trial.begin(place)
            resize(place, (used(place) + int(share * trial.need)) // 4096 * 4096)
            result = trial.run(place)
            yield (
                f"room for {share:.0%} of {trial.need:,} bytes",
                trial.refused(place, result) if result.code else trial.good(place, result),
            )
            resize(place, ROOM)
            yield "then with room", trial.good(place, trial.run(place))


def readonly(trial: Trial) -> Iterator[tuple[str, str]]:
    """A read-only file system: for the inputs, which works; for a finished result; for a new one."""
    place = trial.place("readonly")
    with read_only(trial.inputs):
        outcome = trial.good(place, trial.run(place))
    yield "read-only inputs", outcome
    if not outcome.startswith("FAILED"):
        with read_only(place):
            result = trial.run(place)
        whole = "nothing to do" if result.code == 0 else f"FAILED: {result.stderr[-2000:]}"
        yield (
            "read-only, finished",
            result.stderr.splitlines()[0] if SENTENCE.fullmatch(result.stderr) else whole,
        )
    place = trial.place("readonly-out")
    with read_only(place):
        yield "read-only result", trial.refused(place, trial.run(place))


def stranger(trial: Trial) -> Iterator[tuple[str, str]]:
    """Another user: with a closed home and cache, without a home, and where only root may write."""
    closed = trial.folder / "closed"
    closed.mkdir(mode=0o700, exist_ok=True)
    homes = {NOBODY: {"HOME": str(closed), "XDG_CACHE_HOME": str(closed)}, NAMELESS: {"HOME": ""}}
    for user, env in homes.items():
        place = trial.place(f"stranger-{user}")
        subprocess.run(["chown", "--recursive", str(user), place], check=True)
        name = "a closed home and cache" if user == NOBODY else "a user without a name"
        yield name, trial.good(place, trial.run(place, user=user, **env))
    place = trial.place("stranger-root")
    yield "root's folder", trial.refused(place, trial.run(place, user=NOBODY))
    if trial.stage.name in LOCKED:
        place.chmod(0o777)
        trial.begun(place).mkdir(parents=True, mode=0o700)
        yield "root's unfinished folder", trial.refused(place, trial.run(place, user=NOBODY))


def clock_back(trial: Trial) -> Iterator[tuple[str, str]]:
    """A clock that is set back by a year, between a kill and the next run, and while a stage runs."""
    clock = hostile.clock(trial.folder)
    if clock is None:
        yield "set back", "skipped: no C compiler is installed, to make the clock with"
        return
    (file, env), place = clock, trial.place("clock")
    process = trial.start(place)
    trial.until_under_way(process, place)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    wait(process)
    file.touch()
    yield "set back before the next run", trial.good(place, trial.run(place, **env))
    file.unlink()
    place = trial.place("clock-midway")
    process = trial.start(place, **env)
    trial.until_under_way(process, place)
    file.touch()
    yield "set back in mid-run", trial.good(place, wait(process))
    file.unlink()


def twice(trial: Trial) -> Iterator[tuple[str, str]]:
    """A second run while the first writes, with the same and with other settings; and two at once."""
    place = trial.place("twice")
    first = trial.start(place)
    trial.until_under_way(first, place)
    os.kill(first.pid, signal.SIGSTOP)  # until the others were refused
    other = "shard_size=30KB" if trial.stage.name == "export" else "seed=7"
    yield "a second run", trial.refused(place, trial.run(place))
    yield "a second run, other settings", trial.refused(place, trial.run(place, other))
    os.kill(first.pid, signal.SIGCONT)
    yield "the first", trial.good(place, wait(first))
    place = trial.place("twice-together")
    results = [wait(process) for process in [trial.start(place) for _ in range(2)]]
    for name, result in zip(("first", "second"), sorted(results, key=lambda result: result.code)):
        sentence = SENTENCE.search(result.stderr) if name == "second" else None
        yield f"together, the {name}", sentence[1] if sentence else trial.good(place, result)


PLACED = ("data_prep-2", "train", "export", "graph", "page", "speed", "quality", "report", "study", "gpu_check")
LOCKED = ("data_prep-2", "train", "export", "speed", "quality", "study")
ROWS: dict[str, tuple[Row, tuple[str, ...]]] = {
    "full": (full, PLACED),
    "readonly": (readonly, PLACED),
    "stranger": (stranger, PLACED),
    "clock": (clock_back, LOCKED),
    "twice": (twice, LOCKED),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--stages", nargs="+", default=PLACED, choices=PLACED)
    args = parser.parse_args()
    hostile.enter_namespace("tests.drills.places")
    hostile.open_interpreter()
    counts = {"rows": 0, "failed": 0, "skipped": 0}
    for name in args.stages:
        trial = Trial(args.folder.resolve(), STAGES[name])
        for row in args.rows:
            function, stages = ROWS[row]
            for what, outcome in function(trial) if name in stages else ():
                counts["rows"] += 1
                counts["failed"] += outcome.startswith("FAILED")
                counts["skipped"] += outcome.startswith("skipped")
                print(f"{row:9} {name:10} {what:32} {outcome}", flush=True)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
