"""The checkpoints of a run: which exist, where, and how a run continues from one.

    <out>/checkpoints/step-000123/                the engine's files
    <out>/checkpoints/step-000123/checkpoint.json step, ranks, state, size and CRC-32 of every file
    <out>/checkpoints/.step-000123.partial/       being written; becomes the above in one step

Another number of ranks needs a universal checkpoint, which DeepSpeed's converter writes in its own process. The
converter loads every `mp_rank_*` file of the folder with `weights_only=False`, and uses the names of weights as
paths. So the folder may contain listed files alone, their names of weights are checked, and train.engine
overrules that argument.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist

from conf import UserError
from conf.console import print_line
from conf.errors import describe_error
from conf.files import read_result, with_checksum, write_json
from conf.stage import ROOT, check_same, create_folder, lock, remove_empty
from train.checkpoint import (
    BrokenFile,
    Checkpoint,
    find_whole,
    index,
    list_checkpoints,
    read_checkpoint,
    step_of,
    write_checkpoint,
)
from train.config import CHECKPOINTS, RUN
from train.distributed import broadcast, gather, world_size

if TYPE_CHECKING:
    from train.engine import Engine


class Checkpoints:
    """The checkpoint folder of one run. Every rank has one and calls every method."""

    def __init__(
        self,
        out: Path,
        provenance: Mapping[str, Any],
        *,
        keep_last: int,
        keep_every: int,
    ) -> None:
        self.out = out
        self.folder = out / CHECKPOINTS
        self._rank = dist.get_rank()
        self._ranks = dist.get_world_size()
        self._prune = partial(
            prune, self.folder, keep_last=keep_last, keep_every=keep_every
        )
        self._provenance = provenance
        self._lock: int | None = None
        self._created: list[Path] = []
        self._on_rank_0(self._acquire)
        if broadcast((out / RUN).is_file()):
            check_same(read_result(out / RUN), provenance, out, finished=False)

    def _acquire(self) -> None:
        self._created = create_folder(
            Path(os.path.realpath(self.out)), self.out
        )  # also a link's target
        self._lock = lock(self.out, self.out)

    def record(self) -> None:
        """Write what the run is made from, at its start."""
        if not broadcast((self.out / RUN).is_file()):
            self._on_rank_0(
                partial(write_json, self.out / RUN, with_checksum(self._provenance))
            )

    def release(self) -> None:
        """Let other runs write the folder; where nothing was written, remove it."""
        if self._lock is not None:
            remove_empty(self._created)
            os.close(self._lock)
            self._lock = None

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, None for a new run; report broken ones and set them aside.

        Raises UserError when there are checkpoints and none is intact.
        """
        checkpoint, broken = find_whole(
            broadcast(list_checkpoints(self.folder)), self._read
        )
        for folder, why in broken.items():
            if self._rank == 0:
                print_line(
                    f"train: {folder} is broken ({why}): {checkpoint and checkpoint.name} is used"
                )
            # It would count as the newest. The next save removes it.
            self._on_rank_0(
                partial(folder.rename, folder.with_name(f".{folder.name}.broken"))
            )
        if (
            checkpoint is not None
        ):  # a run that was killed between its last save and its end saves no more
            self._remove_leftovers()
            self._on_rank_0(self._prune)
        return checkpoint

    def load(self, checkpoint: Checkpoint, engine: "Engine") -> None:
        """Load it into the engine, which must be `universal` unless the checkpoint fits the ranks."""
        if checkpoint.fits(self._ranks):
            engine.load(self.folder, checkpoint.name)
            return
        self._remove_leftovers()
        universal = self.folder / f".{checkpoint.name}.universal"
        to_universal(self.folder / checkpoint.name, checkpoint, universal)
        engine.load(self.folder, universal.name)
        gather(None)  # wait until all ranks have read it
        self._remove_leftovers()

    def save(self, engine: "Engine", step: int, state: dict[str, Any]) -> None:
        """Save after `step` steps; then remove older checkpoints as the settings say.

        Raises UserError when the files cannot be written; the earlier checkpoints stay as they were.
        """
        checkpoint = Checkpoint(step, self._ranks, engine.stage, state, {})
        partial_folder = self.folder / f".{checkpoint.name}.partial"
        try:
            self._remove_leftovers()
            for files, failure in gather(engine.save(self.folder, partial_folder.name)):
                if failure is not None:
                    raise failure
                checkpoint.files.update(files)
            self._on_rank_0(lambda: self._publish(partial_folder, checkpoint))
        except OSError as error:
            if self._rank == 0:
                shutil.rmtree(partial_folder, ignore_errors=True)
            earlier = (
                ", ".join(path.name for path in list_checkpoints(self.folder)) or "none"
            )
            raise UserError(
                f"out={self.out}: the checkpoint of step {step} cannot be written: {describe_error(error)}; "
                f"earlier checkpoints, untouched: {earlier}"
            ) from error

    def _publish(self, folder: Path, checkpoint: Checkpoint) -> None:
        write_checkpoint(folder, checkpoint)
        _sync(folder)
        os.replace(folder, self.folder / checkpoint.name)
        _sync(self.folder)
        self._remove("*.broken")
        self._prune()

    def _read(self, folder: Path) -> Checkpoint:
        """Return a checkpoint of whose files every rank has checked its share.

        Raises what `read_checkpoint` does, on every rank.
        """
        checkpoint: Checkpoint | None = None
        failure: BrokenFile | UserError | None = None
        try:
            checkpoint = read_checkpoint(folder, rank=self._rank, ranks=self._ranks)
        except (BrokenFile, UserError) as error:
            failure = error
        for failed in filter(None, gather(failure)):
            raise failed
        assert checkpoint is not None
        return checkpoint

    def _remove_leftovers(self) -> None:
        def remove() -> None:
            for pattern in (".step-*.partial", ".step-*.universal"):
                for left in self.folder.glob(pattern):
                    left.unlink() if left.is_symlink() else shutil.rmtree(left)
            self._remove("*.removed")

        self._on_rank_0(remove)

    def _remove(self, pattern: str) -> None:
        for folder in self.folder.glob(f".step-{pattern}"):
            with _tolerated(folder):
                shutil.rmtree(folder)

    def _on_rank_0(self, action: Callable[[], Any]) -> None:
        """Call `action` on rank 0; raise its error on every rank, which is also a barrier."""
        failure: OSError | UserError | None = None
        if self._rank == 0:
            try:
                action()
            except (OSError, UserError) as error:
                failure = error
        failure = broadcast(failure)
        if failure is not None:
            raise failure


def prune(folder: Path, *, keep_last: int, keep_every: int) -> None:
    """Remove all checkpoints but the last ones and, unless 0, those of every so many steps."""
    for old in list_checkpoints(folder)[keep_last:]:
        if not keep_every or step_of(old) % keep_every:
            removed = old.with_name(f".{old.name}.removed")
            with _tolerated(old):
                old.rename(
                    removed
                )  # first, so that a kill leaves no checkpoint that lacks files
                shutil.rmtree(removed)


@contextmanager
def _tolerated(old: Path) -> Iterator[None]:
    """Report a failed removal instead of ending the run: on NFS a file that is being read cannot be removed."""
    try:
        yield
    except OSError as error:
        print_line(
            f"train: {old} cannot be removed ({error.strerror}): the next save tries again"
        )


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_universal(folder: Path, checkpoint: Checkpoint, out: Path) -> None:
    """Convert the listed files of a checkpoint's folder, which `read_checkpoint` has checked, into `out`.

    Called by every rank. Raises UserError with the converter's last line, and for files with more than tensors
    and plain values.
    """
    for name in sorted(checkpoint.files):
        _check_names(index(folder / name), folder / name)
    with tempfile.TemporaryFile("w+") as errors:
        converter = (
            _start_converter(folder, out, errors) if dist.get_rank() == 0 else None
        )
        # Minutes for a large model: the ranks talk meanwhile, so that no collective times out.
        code: int | None = None
        while code is None:
            if converter is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    converter.wait(timeout=5)
            code = broadcast(converter and converter.poll())
        errors.seek(0)
        output = broadcast(errors.read())
    if converter is not None:
        (out.parent / "latest_universal").unlink(missing_ok=True)
    if code:
        raise UserError(
            f"{folder}: the checkpoint must be convertible for {world_size()} ranks, got "
            f"{(output.splitlines() or ['no reason'])[-1]}. Start with {checkpoint.ranks} ranks."
        )


def _check_names(value: Any, path: Path) -> None:
    """Raise UserError for a name of a weight that leads out of the converter's folders."""
    if isinstance(value, Mapping):
        for name in value:
            if isinstance(name, str) and (
                os.sep in name or name in (os.curdir, os.pardir)
            ):
                raise UserError(
                    f"{path}: names of weights must not be paths, got {name}. Do not use this checkpoint."
                )
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        _check_names(part, path)


def _start_converter(folder: Path, out: Path, errors: IO[str]) -> subprocess.Popen[str]:
    """Start `_convert` below; it ends with this process, which closes its standard input."""
    arguments = [
        "--input_folder",
        folder,
        "--output_folder",
        out,
        "--inject_missing_state",
    ]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "train.checkpoints", *map(str, arguments)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        text=True,
        start_new_session=True,  # a signal to this process ends the step, not the conversion
    )


def _convert() -> None:
    """Run DeepSpeed's converter on the command line's arguments."""
    from train import engine  # noqa: F401 (before deepspeed: it sets which classes PyTorch may load)

    # isort: split
    from deepspeed.checkpoint import ds_to_universal

    threading.Thread(target=_end_with_parent, daemon=True).start()
    ds_to_universal.main(ds_to_universal.parse_arguments())


def _end_with_parent() -> None:
    """Kill the converter and its workers when rank 0 is gone: the next run converts into the same folder."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _convert()
