"""One checkpoint: what checkpoint.json says of its folder, and whether all of it is whole.

Knows folders and checksums; needs no engine.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf import UserError
from conf.files import write_json
from conf.pages import UNFINISHED
from conf.sealed import Broken, sealed, unsealed
from train.engine.files import BrokenFile, check_file

DESCRIBED = "checkpoint.json"
SHARD = "optim_states.pt"  # how the name of a file ends that holds one rank's share of the optimizer


@dataclass(frozen=True)
class Checkpoint:
    """What `checkpoint.json` says."""

    step: int
    ranks: int
    stage: int  # of ZeRO
    state: dict[str, Any]  # the run's own, beside the engine's
    files: dict[str, dict[str, int]]  # size and crc32, by name

    @property
    def name(self) -> str:
        """The folder's."""
        return f"step-{self.step:06d}"

    def fits(self, ranks: int) -> bool:
        """Whether so many ranks can load it as it is."""
        return self.ranks == ranks or not any(name.endswith(SHARD) for name in self.files)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint.json`, which says of itself what it says of the files."""
    write_json(folder / DESCRIBED, sealed(asdict(checkpoint)))


def read_checkpoint(folder: Path, *, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """The checkpoint of a folder whose files, or this rank's share of them, are whole.

    Raises BrokenFile, and UserError for a folder with files that are not listed, or are no regular files.
    """
    try:
        regular = {entry.name: entry.is_file(follow_symlinks=False) for entry in os.scandir(folder)}
    except OSError as error:
        raise BrokenFile(str(error.strerror)) from error
    if strange := sorted(name for name in regular if not regular[name]):
        raise _unlisted(folder, strange)  # before checkpoint.json is read, which may be a pipe
    found = _described(folder)
    if strange := sorted(regular.keys() - {DESCRIBED, *found.files}):
        raise _unlisted(folder, strange)
    if missing := sorted(found.files.keys() - regular.keys()):
        raise BrokenFile(f"{missing[0]}: {os.strerror(errno.ENOENT)}")
    for name in sorted(found.files)[rank::ranks]:
        check_file(folder / name, **found.files[name])
    return found


def _described(folder: Path) -> Checkpoint:
    """Return what `checkpoint.json` says of its folder. Raise BrokenFile for what no save writes."""
    try:
        found = Checkpoint(**unsealed(folder / DESCRIBED))
    except Broken as error:
        raise BrokenFile(f"{DESCRIBED} {error}") from None
    except TypeError:
        raise BrokenFile(f"{DESCRIBED} has other fields than this version's") from None
    numbers = (found.step, found.ranks, found.stage)
    if any(type(number) is not int for number in numbers) or found.name != folder.name:
        raise BrokenFile(f"{DESCRIBED} must describe {folder.name}, got step {found.step}")
    if not isinstance(found.files, dict) or not all(map(_is_plain, found.files, found.files.values())):
        raise BrokenFile(f"{DESCRIBED} must list files by plain names, each with size and crc32")
    return found


def _is_plain(name: str, facts: Any) -> bool:
    return (
        Path(name).name == name
        and isinstance(facts, dict)
        and facts.keys() == {"size", "crc32"}
        and all(type(number) is int for number in facts.values())
    )


def _unlisted(folder: Path, strange: Sequence[str]) -> UserError:
    return UserError(
        f"{folder} must contain only the regular files that {DESCRIBED} lists, got {', '.join(strange)}. "
        "Remove what is not listed, or restore the folder."
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named for."""
    return int(folder.name.removeprefix("step-"))


def find_whole(
    folders: Iterable[Path], read: Callable[[Path], Checkpoint] = read_checkpoint
) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The first whole checkpoint, and what is wrong with those before it. `read` raises BrokenFile.

    Raises UserError when there are checkpoints and none is whole.
    """
    broken: dict[Path, str] = {}
    for folder in folders:
        try:
            return read(folder), broken
        except BrokenFile as error:
            broken[folder] = str(error)
    if broken:
        told = "; ".join(f"{folder.name}: {why}" for folder, why in broken.items())
        raise UserError(
            f"{next(iter(broken)).parent}: wanted a whole checkpoint, found none ({told})", page=UNFINISHED
        )
    return None, broken
