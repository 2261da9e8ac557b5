import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf import UserError
from tests.conftest import tiny_llama
from train.checkpoint import (
    DESCRIBED,
    BrokenFile,
    Checkpoint,
    find_whole,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
    write_file,
)
from train.metrics import StepLog
from train.model import describe


def make(folder: Path, step: int) -> Path:
    checkpoint = Checkpoint(
        step, 2, 1, {"validation": [{"loss": 0.1 + 0.2}], "run_id": None}, {}
    )
    path = folder / checkpoint.name
    path.mkdir(parents=True)
    for name in ("a.pt", "b_optim_states.pt"):
        checkpoint.files[name] = write_file(
            {"weight": torch.arange(1000.0)}, path / name
        )
    write_checkpoint(path, checkpoint)
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_says_what_was_saved(tmp_path: Path) -> None:
    result = read_checkpoint(make(tmp_path, 7))
    assert (result.name, result.ranks, result.stage) == ("step-000007", 2, 1)
    assert result.state == {"validation": [{"loss": 0.1 + 0.2}], "run_id": None}
    assert result.fits(2) and not result.fits(1)
    del result.files["b_optim_states.pt"]
    assert result.fits(1)  # nothing in it is a rank's own


def test_every_byte_counts(tmp_path: Path) -> None:
    """A share of the bytes: a flip anywhere, a file cut short or gone, a record that is
    not the one written.
    """
    path = make(tmp_path, 1)
    for name in ("a.pt", DESCRIBED):
        whole = (path / name).read_bytes()
        for at in range(0, len(whole), 97):
            flip(path / name, at)
            with pytest.raises(BrokenFile):
                read_checkpoint(path)
            (path / name).write_bytes(whole)
        (path / name).write_bytes(whole[:-3])
        with pytest.raises(BrokenFile, match=name):
            read_checkpoint(path)
        (path / name).unlink()
        with pytest.raises(BrokenFile, match=name):
            read_checkpoint(path)
        (path / name).write_bytes(whole)
    read_checkpoint(path)
    (path / "more.pt").touch()
    with pytest.raises(UserError, match="must contain only the files .*, got more.pt"):
        read_checkpoint(path)


def test_ranks_share_the_files(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    flip(path / "b_optim_states.pt", 5)
    read_checkpoint(path, rank=0, ranks=2)
    with pytest.raises(BrokenFile, match="checksum mismatch"):
        read_checkpoint(path, rank=1, ranks=2)


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (2, 4, 6)]
    (tmp_path / ".step-000008.partial").mkdir()
    assert find_whole([]) == (None, {})
    flip(paths[2] / "a.pt", 50)
    result, broken = find_whole(list_checkpoints(tmp_path))
    assert result is not None and result.step == 4
    assert broken == {paths[2]: "a.pt has a checksum mismatch: the file is corrupt"}
    for path in paths[:2]:
        (path / DESCRIBED).unlink()
    with pytest.raises(
        UserError,
        match=r"got step-000006: a\.pt.*; step-000004: .*; step-000002",
    ):
        find_whole(list_checkpoints(tmp_path))


def test_what_an_export_needs_beside_the_weights_is_whole_or_as_before(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start wrote the files anew, in place: a kill amid it left half of one."""
    out = tmp_path / "model"
    describe(tiny_llama(), data_folder, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def killed(source: Path, target: Path) -> None:
        target.write_text("{")
        raise RuntimeError

    shutil.rmtree(out)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(shutil, "copyfile", killed)
        describe(tiny_llama(), data_folder, out)
    assert not out.exists()
    describe(tiny_llama(), data_folder, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_why_a_file_cannot_be_written(tmp_path: Path) -> None:
    """PyTorch says "unexpected pos 64 vs 0" of a full disk. Here the limit is on the
    size of a file.
    """
    code = f"""
import resource, signal, torch
from pathlib import Path
from train.config import TrainConfig
from train.checkpoint import write_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    write_file(torch.rand(100_000), Path({str(tmp_path / "x.pt")!r}))
except OSError as error:
    print(error.errno, error.strerror)
"""
    assert hasattr(resource, "RLIMIT_FSIZE") and hasattr(signal, "SIGXFSZ")
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == f"27 {os.strerror(27)}"


@pytest.mark.parametrize("line", [b"[3]", b"{}", b'{"step": "x"}', b"\xff\xfe"])
def test_a_damaged_line_of_the_log(tmp_path: Path, line: bytes) -> None:
    """A run could not go on: TypeError, KeyError, UnicodeDecodeError, RecursionError."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n{"step": 3}\n')
    StepLog(path, step=2)
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2}']


def test_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    """By name the millionth step counted as the oldest, and was removed. `isdigit`
    accepts a superscript, of which `int` makes no number: a traceback.
    """
    for name in ("step-999750", "step-1000000", "step-999750.bak", "step-²"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-1000000",
        "step-999750",
    ]
