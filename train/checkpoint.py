"""Write, verify, prune and load the checkpoints of a run; map their tensors into memory.

    <out>/checkpoints/step-000123/                the engine's files
    <out>/checkpoints/step-000123/checkpoint.json step, ranks, state, size and CRC-32 of every file
    <out>/checkpoints/.step-000123.partial/       being written; renamed to the above when complete
    <out>/frozen/                                 frozen weights, written once for all checkpoints
    <out>/frozen/frozen.json                      size and CRC-32 of every file

Resumed runs and exports read the frozen weights there: computed again from model.path, the
rows of adaptive ids could be rounded differently, and an export need not find model.path.

To load on another number of ranks, DeepSpeed's converter writes a universal checkpoint in a
process of its own. DeepSpeed finds files by patterns, so a folder must contain only the files
that checkpoint.json lists. This module does not import DeepSpeed: the export uses it too.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch.distributed as dist

from conf.console import print_line
from conf.errors import UNFINISHED, UserError, counted, describe_error, in_one_line
from conf.runs.files import (
    Corrupt,
    read_checksummed,
    read_result,
    with_checksum,
    write_json,
)
from conf.runs.stage import (
    ROOT,
    check_empty,
    check_same,
    create_folder,
    lock,
    remove_empty,
)
from train.config import CHECKPOINTS, FROZEN, RUN
from train.distributed import broadcast, gather
from train.tensor_files import BrokenFile, check_file, load_mapped

CHECKPOINT_FILE = "checkpoint.json"
FROZEN_FILE = "frozen.json"
SHARD = "optim_states.pt"  # suffix of the files with one rank's share of the optimizer
POLL_SECONDS = 5  # interval between checks whether the converter has ended


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:06d}"


@dataclass(frozen=True)
class Checkpoint:
    """The content of `checkpoint.json`."""

    step: int
    ranks: int
    stage: int  # ZeRO stage
    state: dict[str, Any]  # the trainer's state; the engine has its own files
    files: dict[str, dict[str, int]]  # size and crc32 by file name
    frozen: bool = False  # the frozen weights are in FROZEN instead of `files`

    def check(self) -> None:
        """Raise ValueError for a value of a wrong type, or a file name with a folder in it."""
        numbers = [self.step, self.ranks, self.stage]
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(
                f"must have numbers as step, ranks and stage, got {numbers!r:.60}"
            )
        if not isinstance(self.state, dict) or not isinstance(self.files, dict):
            raise ValueError("must have JSON objects as state and files")
        if type(self.frozen) is not bool:
            raise ValueError(
                f"must have true or false as frozen, got {self.frozen!r:.60}"
            )
        if elsewhere := [name for name in self.files if Path(name).name != name]:
            raise ValueError(f"lists {elsewhere[0]!r:.60}, which is in another folder")

    @property
    def name(self) -> str:
        """The folder's name."""
        return name_of(self.step)

    def fits(self, ranks: int) -> bool:
        """Return whether this number of ranks can load it without conversion."""
        sharded = any(name.endswith(SHARD) for name in self.files)
        return self.ranks == ranks or not sharded


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint.json` with a checksum of its content."""
    write_json(folder / CHECKPOINT_FILE, with_checksum(asdict(checkpoint)))


def read_checkpoint(folder: Path, *, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Verify this rank's share of a checkpoint's files; return the content of checkpoint.json.

    Raises BrokenFile for a damaged file, and UserError if the folder has files that
    checkpoint.json does not list.
    """
    try:
        checkpoint = Checkpoint(**read_checksummed(folder / CHECKPOINT_FILE))
        checkpoint.check()
    except (Corrupt, TypeError, ValueError) as error:
        raise BrokenFile(f"{CHECKPOINT_FILE} {error}") from error
    if checkpoint.name != folder.name:
        raise BrokenFile(f"{CHECKPOINT_FILE} describes {checkpoint.name}")
    names = {path.name for path in folder.iterdir()}
    if unlisted := sorted(names - {CHECKPOINT_FILE, *checkpoint.files}):
        raise UserError(
            f"{folder} must contain only the files that {CHECKPOINT_FILE} lists, "
            f"got {', '.join(unlisted)}. Remove the other files."
        )
    for name in sorted(checkpoint.files)[rank::ranks]:
        check_file(folder / name, checkpoint.files[name])
    return checkpoint


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    pattern = re.compile(r"step-\d+")
    paths = [path for path in folder.glob("step-*") if pattern.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name[5:]), reverse=True)


def find_intact(
    folders: Iterable[Path], read: Callable[[Path], Checkpoint] = read_checkpoint
) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the first intact checkpoint, and the damage of each folder before it.

    `read` raises BrokenFile for a damaged folder. Without folders the checkpoint is None.
    Raises UserError if all checkpoints are damaged.
    """
    broken: dict[Path, str] = {}
    for folder in folders:
        try:
            return read(folder), broken
        except BrokenFile as error:
            broken[folder] = str(error)
    if broken:
        reasons = "; ".join(f"{folder.name}: {why}" for folder, why in broken.items())
        raise UserError(
            f"{next(iter(broken)).parent} must have an intact checkpoint, got {reasons}. "
            "Check the disk, and start again with another out.",
            page=UNFINISHED,
        )
    return None, broken


def check_frozen(folder: Path) -> None:
    """Verify the files of frozen weights that a run's checkpoints share.

    Raises UserError if one is missing or damaged.
    """
    try:
        files = read_checksummed(folder / FROZEN_FILE)["files"]
        for name, written in files.items():
            check_file(folder / name, written)
    except (Corrupt, BrokenFile, OSError) as error:
        raise UserError(
            f"{folder} must have the frozen weights of the training, got {error}. "
            "Restore the folder."
        ) from error


class TrainingEngine(Protocol):
    """The methods of `train.engine.Engine` that save and load checkpoints."""

    @property
    def has_frozen(self) -> bool:
        """Whether some weights are frozen; `save` leaves them out."""

    def save_frozen(
        self, folder: Path
    ) -> tuple[dict[str, dict[str, int]], OSError | None]:
        """Write the frozen weights; return rank 0's files and the error of a failed write."""

    def load_frozen(self, folder: Path) -> None:
        """Load the frozen weights from `folder`."""

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""

    def save(
        self, folder: Path, tag: str
    ) -> tuple[dict[str, dict[str, int]], OSError | None]:
        """Write `folder`/`tag`; return this rank's files and the error of a failed write."""

    def load(self, folder: Path, tag: str) -> None:
        """Load weights and optimizer from `folder`/`tag`."""


class Checkpoints:
    """The checkpoint folder of one run. Every rank has one and must call every method."""

    def __init__(
        self, out: Path, provenance: Mapping[str, Any], *, keep_last: int
    ) -> None:
        self.out = out
        self.folder = out / CHECKPOINTS
        self._rank = dist.get_rank()
        self._ranks = dist.get_world_size()
        self._keep_last = keep_last
        self._provenance = provenance
        self._lock: int | None = None
        self._created: list[Path] = []
        self._on_rank_0(self._acquire)
        if broadcast((out / RUN).is_file()):
            check_same(read_result(out / RUN), provenance, out, finished=False)
        elif broadcast(list_checkpoints(self.folder)):
            raise UserError(
                f"out={out} must have {RUN} beside its checkpoints, got none: the settings "
                "of the run are not known. Restore it, or use another out."
            )
        else:
            self._on_rank_0(self._check_new)

    def _acquire(self) -> None:
        # If `out` is a link, create its target.
        self._created = create_folder(Path(os.path.realpath(self.out)), self.out)
        self._lock = lock(self.out, self.out)

    def _check_new(self) -> None:
        """Raise UserError if the folder of a new run has files of another program or stage."""
        # The temporary file of a killed `record`.
        for path in self.out.glob(f".{RUN}." + 12 * "[0-9a-f]"):
            path.unlink()
        check_empty(self.out)

    def record(self) -> None:
        """Write the settings and inputs of a new run, which a resumed run is compared with."""
        content = with_checksum(self._provenance)
        if not broadcast((self.out / RUN).is_file()):
            self._on_rank_0(partial(write_json, self.out / RUN, content))

    def release(self) -> None:
        """Release the lock on the folder; remove the folder if it is new and empty."""
        if self._lock is not None:
            remove_empty(self._created)
            os.close(self._lock)
            self._lock = None

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint; None for a new run.

        Broken checkpoints are reported and renamed, so that the next run skips them.
        Raises UserError if all checkpoints are broken.
        """
        folders = broadcast(list_checkpoints(self.folder))
        checkpoint, broken = find_intact(folders, self._read)
        if checkpoint is None:
            # A run that was killed before its first checkpoint may have rounded them to another dtype.
            frozen = self.out / FROZEN
            self._on_rank_0(partial(shutil.rmtree, frozen, ignore_errors=True))
            return None
        for folder, why in broken.items():
            if self._rank == 0:
                print_line(
                    f"train: {folder} is broken ({why}); continuing from {checkpoint.name}"
                )
            target = folder.with_name(f".{folder.name}.broken")
            self._on_rank_0(partial(folder.rename, target))
        # A run that was killed after its last save takes no more steps and would not clean up.
        self._on_rank_0(self._clean)
        return checkpoint

    def load(self, checkpoint: Checkpoint, engine: TrainingEngine) -> None:
        """Load a checkpoint into the engine, converted if it has another number of ranks.

        An engine that loads a converted checkpoint must be built with universal=True. Raises
        UserError for damaged frozen weights.
        """
        if checkpoint.frozen:
            frozen = self.out / FROZEN
            self._on_rank_0(partial(check_frozen, frozen))
            engine.load_frozen(frozen)
        if checkpoint.fits(self._ranks):
            engine.load(self.folder, checkpoint.name)
            return
        universal = self.folder / f".{checkpoint.name}.universal"
        to_universal(self.folder / checkpoint.name, checkpoint, universal)
        engine.load(self.folder, universal.name)
        gather(None)  # wait until all ranks have read it
        self._on_rank_0(self._clean)

    def save(self, engine: TrainingEngine, step: int, state: dict[str, Any]) -> None:
        """Save the engine and `state` after `step` steps; then remove old checkpoints.

        Raises UserError if a file cannot be written; earlier checkpoints stay.
        """
        checkpoint = Checkpoint(
            step, self._ranks, engine.stage, state, {}, engine.has_frozen
        )
        target = self.folder / f".{checkpoint.name}.partial"
        try:
            if engine.has_frozen and not broadcast((self.out / FROZEN).is_dir()):
                self._save_frozen(engine)
            self._on_rank_0(partial(shutil.rmtree, target, ignore_errors=True))
            for files, failure in gather(engine.save(self.folder, target.name)):
                if failure is not None:
                    raise failure
                checkpoint.files.update(files)
            self._on_rank_0(lambda: self._publish(target, checkpoint))
        except OSError as error:
            if self._rank == 0:
                shutil.rmtree(target, ignore_errors=True)
            earlier = [path.name for path in list_checkpoints(self.folder)]
            raise UserError(
                f"out={self.out}: the checkpoint of step {step} cannot be written: "
                f"{describe_error(error)}. Earlier checkpoints stay: {earlier}."
            ) from error

    def replace_state(self, step: int, state: dict[str, Any]) -> None:
        """Write another `state` into the checkpoint of `step`; its weights are unchanged."""
        folder = self.folder / name_of(step)

        def write() -> None:
            saved = Checkpoint(**read_checksummed(folder / CHECKPOINT_FILE))
            write_checkpoint(folder, replace(saved, state=state))

        self._on_rank_0(write)

    def _save_frozen(self, engine: TrainingEngine) -> None:
        target = self.out / f".{FROZEN}.partial"
        self._on_rank_0(partial(shutil.rmtree, target, ignore_errors=True))
        self._on_rank_0(target.mkdir)
        files, failure = gather(engine.save_frozen(target))[0]
        if failure is not None:
            raise failure

        def publish() -> None:
            write_json(target / FROZEN_FILE, with_checksum({"files": files}))
            _sync(target)
            os.replace(target, self.out / FROZEN)
            _sync(self.out)

        self._on_rank_0(publish)

    def _publish(self, folder: Path, checkpoint: Checkpoint) -> None:
        write_checkpoint(folder, checkpoint)
        _sync(folder)
        os.replace(folder, self.folder / checkpoint.name)
        _sync(self.folder)
        for broken in self.folder.glob(".step-*.broken"):
            shutil.rmtree(broken, ignore_errors=True)
        self._clean()

    def _read(self, folder: Path) -> Checkpoint:
        """Verify a checkpoint on all ranks, each its share of the files, and return it.

        If a rank finds an error of `read_checkpoint`, all ranks raise it.
        """
        result: Checkpoint | BrokenFile | UserError
        try:
            result = read_checkpoint(folder, rank=self._rank, ranks=self._ranks)
        except (BrokenFile, UserError) as error:
            result = error
        results = gather(result)
        for failure in results:
            if isinstance(failure, Exception):
                raise failure
        checkpoint: Checkpoint = results[0]
        return checkpoint

    def _clean(self) -> None:
        """Remove old checkpoints and the temporary folders of killed processes."""
        prune(self.folder, keep_last=self._keep_last)
        for pattern in (".step-*.partial", ".step-*.universal", ".step-*.removed"):
            for folder in self.folder.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)

    def _on_rank_0(self, action: Callable[[], Any]) -> None:
        """Call `action` on rank 0, and raise its error on every rank. This is also a barrier."""
        failure: OSError | UserError | None = None
        if self._rank == 0:
            try:
                action()
            except (OSError, UserError) as error:
                failure = error
        failure = broadcast(failure)
        if failure is not None:
            raise failure


def prune(folder: Path, *, keep_last: int) -> None:
    """Remove all checkpoints except the last `keep_last`.

    Each is renamed first, so that a kill cannot leave a checkpoint with missing files. A
    file that cannot be removed (on NFS, while it is open) stays until the next save.
    """
    for old in list_checkpoints(folder)[keep_last:]:
        removed = old.with_name(f".{old.name}.removed")
        old.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Fsync a folder, so that its file names survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_universal(folder: Path, checkpoint: Checkpoint, out: Path) -> None:
    """Convert a verified checkpoint into a universal one in the folder `out`.

    Every rank must call this. Raises UserError with the converter's last line if it
    fails, and for files with objects other than tensors and plain values.
    """
    for name in sorted(checkpoint.files):
        load_mapped(folder / name)
    with tempfile.TemporaryFile("w+") as errors:
        converter = _converter(folder, out, errors) if dist.get_rank() == 0 else None
        code: int | None = None
        # The ranks communicate while they wait: converting a large model takes longer than
        # the timeout of a collective.
        while code is None:
            if converter is not None:
                try:
                    code = converter.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    code = None
            code = broadcast(code)
        errors.seek(0)
        output = broadcast(errors.read())
    if converter is not None:
        (out.parent / "latest_universal").unlink(missing_ok=True)
    if code:
        raise UserError(
            f"{folder} must be convertible for {counted(dist.get_world_size(), 'rank')}, "
            f"got {in_one_line(RuntimeError(output[-300:]))}. "
            f"Continue with {counted(checkpoint.ranks, 'rank')}."
        )


def _converter(folder: Path, out: Path, errors: IO[str]) -> "subprocess.Popen[str]":
    """Start DeepSpeed's converter. Importing `train.engine` makes PyTorch refuse pickled code."""
    program = (
        "import train.engine; from deepspeed.checkpoint import ds_to_universal as d; "
        "d.main(d.parse_arguments())"
    )
    arguments = ["--input_folder", str(folder), "--output_folder", str(out)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--inject_missing_state"],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=errors,
        text=True,
        start_new_session=True,  # Ctrl-C stops the run, not the converter
    )
