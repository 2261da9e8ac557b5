"""A stage in some place, and whether it ended as it should: as in a good place, or in one sentence.

Knows nothing of what is wrong with the place.
"""

import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tests.drills.hostile import Ended, disk, ended, environment, start
from tests.drills.small_stages import STAGES, Stage

ROOM = 2**30  # bytes of a disk that is large enough
SENTENCE = re.compile(r"(?:\A|\n)(error: [^\n]+)\n(  see docs/\S+\n)?\Z")  # figures may stand before it
ASIDE = re.compile(r"(^|/)wandb(/|$)")  # its folders are called by the time


@dataclass
class Drill:
    """The folders of a drill, and what each stage came to in a good place."""

    demo: Path
    folder: Path
    whole: dict[str, tuple[dict[str, str], set[str], int]] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """One that can be written."""
        return self.folder / "home"

    def place(self, name: str) -> Path:
        """A new folder."""
        place = self.folder / name
        place.mkdir()
        return place

    def give(self, stage: Stage, place: Path) -> None:
        """What a stage finds in its folder."""
        for name in stage.given:
            shutil.copytree(self.demo / name, place / name, dirs_exist_ok=True)

    def start(self, stage: Stage, place: Path, *more: str, user: int = 0, **env: str) -> subprocess.Popen[str]:
        """The user's command, begun."""
        command = [*stage.command(self.demo, place), *more]
        return start(command, environment(self.home, **env), user=user)

    def run(self, stage: Stage, place: Path, *more: str, user: int = 0, **env: str) -> Ended:
        """The same, ended."""
        return ended(self.start(stage, place, *more, user=user, **env))

    def wanted(self, name: str) -> tuple[dict[str, str], set[str], int]:
        """Of a stage in a good place: what never differs, all names, and the bytes that it takes at most."""
        if name not in self.whole:
            stage, place = STAGES[name], self.folder / f"whole-{name}"
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
                self.whole[name] = stage.found(place), names(place), most[0] - given
        return self.whole[name]


def used(place: Path) -> int:
    """Bytes of a disk."""
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _watch(place: Path, most: list[int], done: threading.Event) -> None:
    while not done.wait(0.01):
        most[0] = max(most[0], used(place))


def names(place: Path) -> set[str]:
    """All files in a place, hidden ones too."""
    files = (str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    return {name for name in files if not ASIDE.search(name)}


def refused(name: str, place: Path, end: Ended) -> str:
    """What was told, in one sentence; or what is wrong with it."""
    result, told = place / STAGES[name].result, SENTENCE.search(end.err)
    if end.code != 2 or told is None or "Traceback" in end.err:
        return f"FAILED: code {end.code}: {(end.err or end.out)[-2000:]}"
    if result.is_file() or (result / "manifest.json").is_file():
        return f"FAILED: a result is there: {end.err}"
    return told[1].replace(str(place), "DIR")


def good(drill: Drill, name: str, place: Path, end: Ended) -> str:
    """That it ended as in a good place; or what is wrong with it."""
    wanted, every, _ = drill.wanted(name)
    if end.code:
        return f"FAILED: code {end.code}: {(end.err or end.out)[-2000:]}"
    found, there = STAGES[name].found(place), names(place)
    if found != wanted:
        return f"FAILED: other files: {sorted(dict(found.items() ^ wanted.items()))}"
    if there != every:
        return f"FAILED: other names: {sorted(there ^ every)}"
    return "as in a good place"
