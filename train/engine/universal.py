"""A checkpoint in the form that any number of ranks can load, made by DeepSpeed's converter in its own process.

The converter loads every `mp_rank_*` file below its input folder with `weights_only=False`, and uses the names
of weights as paths. So it gets a folder of links to the listed files alone, whose names of weights are checked,
and train.engine.engine has that argument overruled.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from conf import UserError
from conf.stage import ROOT
from train.engine import engine  # noqa: F401 (before deepspeed: it sets what PyTorch may load)
from train.engine.byte_ranges import index
from train.engine.checkpoint import Checkpoint
from train.engine.ranks import first_ranks, world_size

# isort: split
from deepspeed.checkpoint import ds_to_universal


def to_universal(folder: Path, checkpoint: Checkpoint, out: Path) -> None:
    """Rewrite the listed files of a checkpoint's folder, which `read_checkpoint` has checked, into `out`.

    Called by every rank. Raises UserError with the converter's last line, and for files with more than tensors
    and plain values.
    """
    for name in sorted(checkpoint.files):
        _check_names(index(folder / name), folder / name)
    with contextlib.ExitStack() as stack:
        converter: subprocess.Popen[str] | None = None
        if torch.distributed.get_rank() == 0:
            links = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name in checkpoint.files:
                (links / name).symlink_to((folder / name).absolute())
            alive, ours = os.pipe()
            stack.callback(os.close, ours)
            converter = _start(links, out, alive)
            os.close(alive)
        # Minutes for a large model: the ranks keep talking, so that no collective times out.
        code, output = None, ""
        while code is None:
            if converter is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output = converter.communicate(timeout=5)[1]
            code, output = first_ranks((converter.poll() if converter else None, output))
        if converter is not None:
            (out.parent / "latest_universal").unlink(missing_ok=True)
    if code:
        raise UserError(
            f"{folder}: the checkpoint must be convertible for {world_size()} ranks, got "
            f"{(output.splitlines() or ['no reason'])[-1]}. Start with {checkpoint.ranks} ranks."
        )


def _check_names(value: Any, path: Path) -> None:
    """Raise UserError for a name of a weight that leads out of the converter's folders.

    Each container is read once: a pickle may hold a list in itself, or in a thousand others.
    """
    waiting, read = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, Mapping | list | tuple) or id(value) in read:
            continue
        read.add(id(value))
        for name in value if isinstance(value, Mapping) else ():
            if isinstance(name, str) and (os.sep in name or name in (os.curdir, os.pardir)):
                raise UserError(
                    f"{path}: names of weights must not be paths, got {name}. Do not use this checkpoint."
                )
        waiting += value.values() if isinstance(value, Mapping) else value


def _start(folder: Path, out: Path, alive: int) -> subprocess.Popen[str]:
    """Start `main` below; it ends when the other end of the pipe `alive` is closed."""
    arguments = ["--input_folder", folder, "--output_folder", out, "--inject_missing_state"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "train.engine.universal", *map(str, arguments)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": paths},
        stdin=alive,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal to this process ends the step, not the conversion
    )


def _end_with_parent() -> None:
    """Kill the converter and its workers when rank 0 is gone: the next run converts into the same folder."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run DeepSpeed's converter on the command line's arguments."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    main()
