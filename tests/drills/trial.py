"""A stage in some place, and whether it ended as it should: as in a good place, or in one sentence.

Knows nothing of what is wrong with the place.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from conf.stage import MANIFEST
from tests.drills.facts import difference, facts_of, not_whole
from tests.drills.hostile import Ended, disk, ended, environment, start
from tests.drills.kills import made
from tests.drills.stages import STAGES, Stage

ROOM = 2**30  # bytes of a disk that is large enough
SENTENCE = re.compile(r"(?:\A|\n)(error: [^\n]+)\n(  see docs/\S+\n)?\Z")  # figures may stand before it


@dataclass
class Drill:
    """The folders of a drill, and what each stage came to in a good place."""

    folder: Path
    whole: dict[str, tuple[dict[str, str], int]] = field(default_factory=dict)

    @property
    def inputs(self) -> Path:
        """What undisturbed runs left for others (kills.py)."""
        return self.folder / "whole"

    @property
    def home(self) -> Path:
        """One that can be written."""
        return self.folder / "home"

    def place(self, name: str) -> Path:
        """A new folder."""
        place = self.folder / "places" / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def give(self, stage: Stage, place: Path) -> None:
        """What a stage finds in its folder."""
        for name in stage.needs:
            made(name, self.folder)
        if stage.begin:
            stage.begin(self.inputs, place)

    def start(self, stage: Stage, place: Path, *more: str, user: int = 0, **env: str) -> subprocess.Popen[str]:
        """The user's command, begun."""
        command = [sys.executable, "-m", *stage.words(self.inputs, place), *more]
        return start(command, environment(self.home, **env), user=user)

    def run(self, stage: Stage, place: Path, *more: str, user: int = 0, **env: str) -> Ended:
        """The same, ended."""
        return ended(self.start(stage, place, *more, user=user, **env))

    def wanted(self, name: str) -> tuple[dict[str, str], int]:
        """Of a stage in a good place: what it leaves, and the bytes that it takes at most."""
        if name not in self.whole:
            stage, place = STAGES[name], self.place(f"whole-{name}")
            with disk(place, ROOM):
                self.give(stage, place)
                given, most = used(place), [0]
                done = threading.Event()
                watch = threading.Thread(target=_watch, args=(place, most, done))
                watch.start()
                end = self.run(stage, place)
                done.set()
                watch.join()
                if end.code:
                    raise SystemExit(f"{name}: code {end.code} in a good place: {end.err}")
                self.whole[name] = facts_of(stage, place), most[0] - given
        return self.whole[name]


def used(place: Path) -> int:
    """Bytes of a disk."""
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _watch(place: Path, most: list[int], done: threading.Event) -> None:
    while not done.wait(0.01):
        most[0] = max(most[0], used(place))


def refused(drill: Drill, name: str, place: Path, end: Ended) -> str:
    """What was told, in one sentence; or what is wrong with it. Where a report is made of a stage's result, and
    has no place, the result is kept.
    """
    stage, told = STAGES[name], SENTENCE.search(end.err)
    if end.code != 2 or told is None or "Traceback" in end.err:
        return f"FAILED: code {end.code}: {(end.err or end.out)[-2000:]}"
    result = place / stage.result
    if result.is_file() or (result / MANIFEST).is_file():
        faults = list(not_whole(stage, place, drill.wanted(name)[0]))
        if stage.result == stage.out or faults:
            return f"FAILED: a result is there: {end.err}{', '.join(faults)}"
    return told[1].replace(str(place), "DIR")


def good(drill: Drill, name: str, place: Path, end: Ended) -> str:
    """That it ended as in a good place; or what is wrong with it."""
    wanted, _ = drill.wanted(name)
    if end.code:
        return f"FAILED: code {end.code}: {(end.err or end.out)[-2000:]}"
    differs = list(difference(facts_of(STAGES[name], place), wanted))
    return f"FAILED: {', '.join(differs)}" if differs else "as in a good place"
