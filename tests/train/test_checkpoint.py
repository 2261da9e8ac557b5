import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from conf import UserError, settings
from conf.files import read_checksummed, with_checksum, write_json
from tests.conftest import tiny_llama
from train.__main__ import main
from train.checkpoint import (
    DESCRIBED,
    BrokenFile,
    Checkpoint,
    check_file,
    find_whole,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
    write_file,
)
from train.checkpoints import prune
from train.config import TrainConfig
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
    """A share of the bytes: a flip anywhere, a file cut short or gone, a record that is not the one written."""
    path = make(tmp_path, 1)
    for name in ("a.pt", DESCRIBED):
        whole = (path / name).read_bytes()
        for at in range(0, len(whole), 97):
            flip(path / name, at)
            with pytest.raises(BrokenFile):
                read_checkpoint(path)
            (path / name).write_bytes(whole)
        (path / name).write_bytes(whole[:-3])
        with pytest.raises(
            BrokenFile, match=r"bytes instead of|cannot be read|not what was written"
        ):
            read_checkpoint(path)
        (path / name).unlink()
        with pytest.raises(BrokenFile, match=name):
            read_checkpoint(path)
        (path / name).write_bytes(whole)
    read_checkpoint(path)


ADDED: dict[str, Callable[[Path], Any]] = {
    "without .pt": lambda folder: (folder / "mp_rank_99").touch(),
    "in a subfolder": lambda folder: (folder / "x").mkdir(),
    "a link": lambda folder: (folder / "x.pt").symlink_to(folder / "a.pt"),
    "the list as a pipe": lambda folder: (
        (folder / DESCRIBED).unlink(),
        os.mkfifo(folder / DESCRIBED),
    ),
}


@pytest.mark.parametrize("added", ADDED)
def test_a_file_that_is_not_listed_is_refused_by_name(
    tmp_path: Path, added: str
) -> None:
    """DeepSpeed looks for files by patterns, in subfolders too: an added one was loaded, its pickle run."""
    path = make(tmp_path, 1)
    before = set(path.iterdir())
    ADDED[added](path)
    name = next((entry.name for entry in path.iterdir() if entry not in before), "")
    with pytest.raises(
        UserError,
        match=f"must contain only the regular files that .* lists, got .*{name}",
    ):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"files": {"../a.pt": {"size": 1, "crc32": 1}}}, "No such file"),
        ({"files": {"a\0.pt": {"size": 1, "crc32": 1}}}, "No such file"),
        ({"files": {"a.pt": 7}}, "other fields"),
        ({"files": 7}, "other fields"),
        ({"step": 2}, "must describe step-000001, got step 2"),
        ({"step": "1"}, "must describe step-000001, got step 1"),
    ],
)
def test_a_list_that_no_save_wrote_is_refused(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    """A list by anybody, with a sum that fits, named files anywhere, or the folder of another step to load."""
    path = make(tmp_path, 1)
    write_json(
        path / DESCRIBED, with_checksum(read_checksummed(path / DESCRIBED) | change)
    )
    if "files" in change:
        for file in path.glob("*.pt"):
            file.unlink()
    with pytest.raises(BrokenFile, match=sentence):
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
        match=r"got none \(step-000006: a\.pt.*; step-000004: .*; step-000002",
    ):
        find_whole(list_checkpoints(tmp_path))


@pytest.mark.parametrize(
    ("last", "every", "remaining"),
    [(1, 0, [10]), (2, 0, [8, 10]), (1, 4, [4, 8, 10]), (9, 0, [2, 4, 6, 8, 10])],
)
def test_old_checkpoints_go(
    tmp_path: Path, last: int, every: int, remaining: list[int]
) -> None:
    for step in (2, 4, 6, 8, 10):
        make(tmp_path, step)
    prune(tmp_path, keep_last=last, keep_every=every)
    assert sorted(int(path.name[-6:]) for path in tmp_path.iterdir()) == remaining


def test_a_checkpoint_that_is_being_removed_no_longer_looks_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill amid it left a folder by the name of a checkpoint that lacked files."""

    def killed(path: Path) -> None:
        (path / "a.pt").unlink()
        raise RuntimeError

    for step in (2, 4):
        make(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(RuntimeError):
        prune(tmp_path, keep_last=1, keep_every=0)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004"]


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

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(shutil, "copyfile", killed)
        describe(tiny_llama(), data_folder, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    describe(tiny_llama(), data_folder, out)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_is_summed_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    written = write_file({"a": torch.rand(3, 5), "b": [1, "two"]}, path)
    check_file(path, **written)
    assert torch.load(path)["b"] == [1, "two"]


def test_why_a_file_cannot_be_written(tmp_path: Path) -> None:
    """PyTorch says "unexpected pos 64 vs 0" of a full disk. Here the limit is on the size of a file."""
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


def test_an_unfinished_run_is_not_gone_on_with_unasked(
    data_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text("{}")
    arguments = [
        "model=demo",
        f"data.path={data_folder}",
        f"out={tmp_path}",
        "resume=false",
    ]
    with pytest.raises(
        UserError, match=r"must have no run with resume=false, got an unfinished one"
    ):
        main(settings("train", TrainConfig, arguments))


def test_a_record_with_other_fields(tmp_path: Path) -> None:
    """One of another version, with the right sum, was a TypeError; now an earlier checkpoint is taken."""
    make(tmp_path, 2)
    path = make(tmp_path, 4)
    write_json(path / DESCRIBED, with_checksum({"step": 4, "files": {}}))
    result, broken = find_whole(list_checkpoints(tmp_path))
    assert result is not None and result.step == 2
    assert broken == {path: "checkpoint.json has other fields than this version's"}


@pytest.mark.parametrize(
    "line", [b"[3]", b"{}", b'{"step": "x"}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_damaged_line_of_the_log(tmp_path: Path, line: bytes) -> None:
    """A run could not go on: TypeError, KeyError, UnicodeDecodeError, RecursionError."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n{"step": 3}\n')
    StepLog(path, step=2)
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2}']


def test_what_cannot_be_removed_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On NFS an old checkpoint that is being read cannot be: the run ended, its restart was a traceback."""
    for step in (1, 2):
        make(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil,
            "rmtree",
            Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")),
        )
        prune(tmp_path, keep_last=1, keep_every=0)
    assert (
        "step-000001 cannot be removed (Directory not empty): the next save tries again"
        in capsys.readouterr().out
    )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002"]


def test_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    """By name the millionth step counted as the oldest, and was removed. `isdigit` accepts a superscript, of
    which `int` makes no number: a traceback.
    """
    for name in ("step-999750", "step-1000000", "step-999750.bak", "step-²"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-1000000",
        "step-999750",
    ]
