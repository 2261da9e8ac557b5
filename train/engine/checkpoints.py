"""The checkpoints of a run: what is kept, where, and how a run is found again.

    <out>/checkpoints/step-000123/                the engine's files
    <out>/checkpoints/step-000123/checkpoint.json step, ranks, state, size and CRC-32 of every file
    <out>/checkpoints/.step-000123.partial/       being written; becomes the above in one step

Knows folders; the engine writes and reads the tensors.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from conf import UserError
from conf.console import print_line
from conf.files import read_result, sealed, write_json
from conf.stage import check_same, create_folder, lock
from train.engine.checkpoint import (
    BrokenFile,
    Checkpoint,
    find_whole,
    list_checkpoints,
    read_checkpoint,
    step_of,
    write_checkpoint,
)
from train.engine.engine import Engine
from train.engine.ranks import every_ranks, first_ranks
from train.engine.universal import to_universal
from train.folder import CHECKPOINTS, RUN


def prune(folder: Path, *, keep_last: int, keep_every: int) -> None:
    """Remove all checkpoints but the last ones and, unless 0, those of every so many steps."""
    for old in list_checkpoints(folder)[keep_last:]:
        if not keep_every or step_of(old) % keep_every:
            removed = old.with_name(f".{old.name}.removed")
            with _told_if_it_fails(old):
                old.rename(removed)  # first: killed amid it, no checkpoint is left that lacks files
                shutil.rmtree(removed)


@contextmanager
def _told_if_it_fails(old: Path) -> Iterator[None]:
    """What is too much ends no run: on NFS a file that somebody reads cannot be removed."""
    try:
        yield
    except OSError as error:
        print_line(f"train: {old} cannot be removed ({error.strerror}): the next save tries again")


class Checkpoints:
    """The checkpoint folder of one run. Every rank holds one and calls every method."""

    def __init__(self, out: Path, made: Mapping[str, Any], *, keep_last: int, keep_every: int) -> None:
        self.out, self.folder = out, out / CHECKPOINTS
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._kept = {"keep_last": keep_last, "keep_every": keep_every}
        self._lock: int | None = None
        self._on_first(self._hold)
        begun = out / RUN
        if first_ranks(begun.is_file()):
            check_same(read_result(begun), made, out, finished=False)
        else:
            self._on_first(partial(write_json, begun, sealed(made)))

    def release(self) -> None:
        """Let other runs write the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self) -> None:
        create_folder(Path(os.path.realpath(self.out)), self.out)  # also a link's target
        self._lock = lock(self.out, self.out)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, None for a new run; those found broken are told and set aside.

        Raises UserError when there are checkpoints and none is whole.
        """
        found, broken = find_whole(first_ranks(list_checkpoints(self.folder)), self._read)
        for folder, why in broken.items():
            if self._rank == 0:
                print_line(f"train: {folder} is broken ({why}): {found and found.name} is taken")
            # It would count as the newest. The next save removes it.
            self._on_first(partial(folder.rename, folder.with_name(f".{folder.name}.broken")))
        if found is not None:  # a run that was killed between its last save and its end saves no more
            self._remove_leftovers()
            self._on_first(partial(prune, self.folder, **self._kept))
        return found

    def load(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Bring the engine to where it was; it must be `universal` unless the checkpoint fits the ranks."""
        if checkpoint.fits(self._ranks):
            engine.load(self.folder, checkpoint.name)
            return
        self._remove_leftovers()
        universal = self.folder / f".{checkpoint.name}.universal"
        to_universal(self.folder / checkpoint.name, checkpoint, universal)
        engine.load(self.folder, universal.name)
        every_ranks(None)  # loading ends on no rank later than here: the others may still be reading
        self._remove_leftovers()

    def save(self, engine: Engine, step: int, state: dict[str, Any]) -> None:
        """Save after `step` steps; then remove older checkpoints as the settings say.

        Raises UserError when the files cannot be written; the earlier checkpoints are left as they were.
        """
        checkpoint = Checkpoint(step, self._ranks, engine.stage, state, {})
        writing = self.folder / f".{checkpoint.name}.partial"
        try:
            self._remove_leftovers()
            for files, failure in every_ranks(engine.save(self.folder, writing.name)):
                if failure is not None:
                    raise failure
                checkpoint.files.update(files)
            self._on_first(lambda: self._publish(writing, checkpoint))
        except OSError as error:
            if self._rank == 0:
                shutil.rmtree(writing, ignore_errors=True)
            kept = ", ".join(path.name for path in list_checkpoints(self.folder)) or "none"
            raise UserError(
                f"out={self.out}: the checkpoint of step {step} cannot be written: {error.strerror}; "
                f"earlier checkpoints, untouched: {kept}"
            ) from error

    def _publish(self, writing: Path, checkpoint: Checkpoint) -> None:
        write_checkpoint(writing, checkpoint)
        _sync(writing)
        os.replace(writing, self.folder / checkpoint.name)
        _sync(self.folder)
        for old in self.folder.glob(".step-*.broken"):
            with _told_if_it_fails(old):
                shutil.rmtree(old)
        prune(self.folder, **self._kept)

    def _read(self, folder: Path) -> Checkpoint:
        """A checkpoint of whose files every rank has checked its share. Raises what `read_checkpoint` does, on
        every rank.
        """
        checkpoint: Checkpoint | None = None
        failure: BrokenFile | UserError | None = None
        try:
            checkpoint = read_checkpoint(folder, rank=self._rank, ranks=self._ranks)
        except (BrokenFile, UserError) as error:
            failure = error
        for failed in filter(None, every_ranks(failure)):
            raise failed
        assert checkpoint is not None
        return checkpoint

    def _remove_leftovers(self) -> None:
        def remove() -> None:
            for pattern in (".step-*.partial", ".step-*.universal"):
                for left in self.folder.glob(pattern):
                    left.unlink() if left.is_symlink() else shutil.rmtree(left)
            for left in self.folder.glob(".step-*.removed"):
                with _told_if_it_fails(left):
                    shutil.rmtree(left)

        self._on_first(remove)

    def _on_first(self, action: Callable[[], Any]) -> None:
        """Do something on rank 0; its error is raised on every rank, which is also a barrier."""
        failure: OSError | UserError | None = None
        if self._rank == 0:
            try:
                action()
            except (OSError, UserError) as error:
                failure = error
        failure = first_ranks(failure)
        if failure is not None:
            raise failure


def _sync(folder: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
