"""One checkpoint: what checkpoint.json says of its folder, and whether all of it is whole.

Knows folders and checksums; needs no engine.
"""

from collections.abc import Callable, Iterable
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

    Raises BrokenFile.
    """
    try:
        found = Checkpoint(**unsealed(folder / DESCRIBED))
    except Broken as error:
        raise BrokenFile(f"{DESCRIBED} {error}") from None
    except TypeError:
        raise BrokenFile(f"{DESCRIBED} has other fields than this version's") from None
    for name in sorted(found.files)[rank::ranks]:
        check_file(folder / name, **found.files[name])
    return found


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
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
