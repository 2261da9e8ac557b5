"""Hostile places: every stage on a full disk, in read-only folders, among another's files, by a wrong clock.

    python -m tests.drills.places FOLDER [--rows full ...] [--stages data_prep-2 train ...]

FOLDER keeps what the stages (stages.py) read of one another, for another time. The rows are the functions in
ROWS. Every refusal must be one sentence with code 2, and leave nothing of the result; with its cause gone the
same command must end as it does in a good place, with the same files. Needs root, for it mounts file systems
and takes another user's id, in a mount namespace of its own. The last line is JSON.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from conf.stage import partial_of
from tests.drills.hostile import (
    NOBODY,
    STRANGER,
    Ended,
    clock,
    disk,
    ended,
    enlarge,
    enter_namespace,
    killed_when,
    open_interpreter,
    read_only,
)
from tests.drills.stages import STAGES, Stage
from tests.drills.trial import ROOM, SENTENCE, Drill, good, refused, used

SHARES = (0.1, 0.4, 0.7, 0.95)  # of what a stage needs at most
NEGATIVE = re.compile(r"(?<![\w.-])-\d[\d.,]* (tok|s\b|ms|MB|steps)")
Row = Callable[[Drill, str], Iterator[tuple[str, str]]]


def full(drill: Drill, name: str) -> Iterator[tuple[str, str]]:
    """A disk that is full from the start, or after a part of what the stage writes; then there is room."""
    stage, need = STAGES[name], drill.wanted(name)[1]
    for share in (0.0, *SHARES):
        place = drill.place(f"full-{name}-{share}")
        with disk(place, ROOM):
            drill.give(stage, place)
            given = used(place)
            size = (given + int(share * need)) // 4096 * 4096
            enlarge(place, max(size, 4096))
            if not size:
                (place / "ballast").write_bytes(bytes(4096))
            end = drill.run(stage, place)
            told = good(drill, name, place, end) if not end.code else refused(drill, name, place, end)
            enlarge(place, ROOM)
            yield f"room for {share:.0%} of {need:,} bytes", told
            yield "then with room", good(drill, name, place, drill.run(stage, place))


def readonly(drill: Drill, name: str) -> Iterator[tuple[str, str]]:
    """A file system that is mounted read-only: for the inputs, which works, and for the result."""
    stage, place = STAGES[name], drill.place(f"readonly-{name}")
    drill.give(stage, place)
    with read_only(drill.inputs):
        told = good(drill, name, place, drill.run(stage, place))
        yield "read-only inputs", told
        if not told.startswith("FAILED"):
            yield "read-only, finished", _again(drill, name, place)
    other = drill.place(f"readonly-{name}-out")
    drill.give(stage, other)
    with read_only(other):
        yield "read-only result", refused(drill, name, other, drill.run(stage, other))


def _again(drill: Drill, name: str, place: Path) -> str:
    """A finished result of which a second run finds that it is finished, where no one can write."""
    with read_only(place):
        end = drill.run(STAGES[name], place)
    if end.code == 0:
        return "nothing to do"
    return end.err.splitlines()[0] if SENTENCE.fullmatch(end.err) else f"FAILED: {end.err[-2000:]}"


def stranger(drill: Drill, name: str) -> Iterator[tuple[str, str]]:
    """Another user: with a closed home and cache, with no home, and where only root may write."""
    stage = STAGES[name]
    closed = drill.folder / "closed"
    closed.mkdir(mode=0o700, exist_ok=True)
    for what, user in (("a closed home and cache", NOBODY), ("a user without a name", STRANGER)):
        place = drill.place(f"stranger-{name}-{user}")
        drill.give(stage, place)
        _give_away(place, user)
        env = {"HOME": str(closed), "XDG_CACHE_HOME": str(closed)} if user == NOBODY else {"HOME": ""}
        yield what, good(drill, name, place, drill.run(stage, place, user=user, **env))
    place = drill.place(f"stranger-{name}-root")
    drill.give(stage, place)
    yield "root's folder", refused(drill, name, place, drill.run(stage, place, user=NOBODY))
    if name in BEGUN:
        place.chmod(0o777)
        partial = begun_at(stage, place)
        partial.mkdir(parents=True, mode=0o700)
        yield "root's unfinished folder", refused(drill, name, place, drill.run(stage, place, user=NOBODY))


def _give_away(place: Path, user: int) -> None:
    subprocess.run(["chown", "--recursive", str(user), place], check=True)


def begun_at(stage: Stage, place: Path) -> Path:
    """What is there as soon as a stage writes its folder, which it locks."""
    result = place / stage.result
    return result if stage.name == "train" else partial_of(result)


def clock_back(drill: Drill, name: str) -> Iterator[tuple[str, str]]:
    """A clock that is set back by a year, between a kill and the rerun, and while a stage runs."""
    found = clock(drill.folder)
    if found is None:
        yield "set back", "skipped: no C compiler is installed, to make the clock with"
        return
    stage, place, (said, env) = STAGES[name], drill.place(f"clock-{name}"), found
    killed_when(drill.start(stage, place), lambda: _is_under_way(stage, place))
    said.touch()
    yield "set back before the rerun", _in_time(drill, name, place, drill.run(stage, place, **env))
    said.unlink()
    place = drill.place(f"clock-{name}-midway")
    process = drill.start(stage, place, **env)
    while process.poll() is None and not _is_under_way(stage, place):
        time.sleep(0.05)
    said.touch()
    yield "set back in mid-run", _in_time(drill, name, place, ended(process))
    said.unlink()


def _in_time(drill: Drill, name: str, place: Path, end: Ended) -> str:
    """That it ended as in a good place, and no time or speed that it told of was below zero."""
    wrong = NEGATIVE.search(end.out + end.err)
    return f"FAILED: {wrong[0]}" if wrong else good(drill, name, place, end)


def _is_under_way(stage: Stage, place: Path) -> bool:
    begun = begun_at(stage, place)
    if stage.name == "train":
        return (begun / "checkpoints" / "step-000003").is_dir()
    return begun.is_dir() and any(begun.iterdir())


def twice(drill: Drill, name: str) -> Iterator[tuple[str, str]]:
    """A second run while the first writes, alike and with other settings; and two that start together."""
    stage, place = STAGES[name], drill.place(f"twice-{name}")
    first = drill.start(stage, place)
    while first.poll() is None and not _is_under_way(stage, place):
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGSTOP)  # until the others have been told
    for what, more in (
        ("alike", []),
        ("with other settings", ["shard_size=30KB" if name == "export" else "seed=7"]),
    ):
        yield f"a second run, {what}", refused(drill, name, place, drill.run(stage, place, *more))
    os.kill(first.pid, signal.SIGCONT)
    yield "the first", good(drill, name, place, ended(first))
    place = drill.place(f"twice-{name}-together")
    ends = [ended(process) for process in [drill.start(stage, place) for _ in range(2)]]
    ends.sort(key=lambda end: end.code)
    yield "together, the first", good(drill, name, place, ends[0])
    told = SENTENCE.search(ends[1].err)
    yield "together, the second", told[1] if told else good(drill, name, place, ends[1])


PLACED = ("data_prep-2", "train", "export", "graph", "page", "speed", "quality", "report", "study", "gpu_check")
BEGUN = ("data_prep-2", "train", "export", "speed", "quality", "study")  # what locks its folder
ROWS: dict[str, tuple[Row, tuple[str, ...]]] = {
    "full": (full, PLACED),
    "readonly": (readonly, PLACED),
    "stranger": (stranger, PLACED),
    "clock": (clock_back, BEGUN),
    "twice": (twice, BEGUN),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--stages", nargs="+", default=PLACED, choices=PLACED)
    args = parser.parse_args()
    enter_namespace("tests.drills.places")
    open_interpreter()
    drill = Drill(args.folder.resolve())
    for place in (drill.home, drill.inputs):
        place.mkdir(parents=True, exist_ok=True)
    counts = {"rows": 0, "failed": 0, "skipped": 0}
    for name in args.stages:
        for row in args.rows:
            do, stages = ROWS[row]
            for what, told in do(drill, name) if name in stages else ():
                counts["rows"] += 1
                counts["failed"] += told.startswith("FAILED")
                counts["skipped"] += told.startswith("skipped")
                print(f"{row:9} {name:10} {what:32} {told}", flush=True)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
