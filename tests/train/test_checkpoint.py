import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.errors import UserError
from conf.runs.files import read_json, with_checksum, write_json
from tests.conftest import tiny_llama
from train.checkpoint import (
    CHECKPOINT_FILE,
    FROZEN_FILE,
    Checkpoint,
    check_frozen,
    find_intact,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from train.model import write_architecture
from train.tensor_files import BrokenFile, write_file

STATE = {"validation": [{"loss": 0.1 + 0.2}], "run_id": None}


def make(folder: Path, step: int) -> Path:
    checkpoint = Checkpoint(step, 2, 1, STATE, {})
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


WRONG_TYPES: dict[str, Any] = {
    "step": "7",
    "ranks": 2.0,
    "stage": True,
    "state": [],
    "files": {"../a.pt": {"size": 0, "crc32": 0}},
    "frozen": 1,
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_value_of_a_wrong_type_is_damage(tmp_path: Path, name: str) -> None:
    """Bug: a step that was text, with a valid checksum, ended in a traceback."""
    path = make(tmp_path, 7)
    content = asdict(read_checkpoint(path)) | {name: WRONG_TYPES[name]}
    write_json(path / CHECKPOINT_FILE, with_checksum(content))
    with pytest.raises(BrokenFile, match=CHECKPOINT_FILE):
        read_checkpoint(path)


def test_a_fifo_is_damage_and_is_not_opened(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    (path / "a.pt").unlink()
    os.mkfifo(path / "a.pt")
    with pytest.raises(BrokenFile, match="a.pt is not a regular file"):
        read_checkpoint(path)
    (path / CHECKPOINT_FILE).unlink()
    os.mkfifo(path / CHECKPOINT_FILE)
    with pytest.raises(BrokenFile, match="cannot be read"):
        read_checkpoint(path)


def test_damaged_missing_and_unlisted_files_are_detected(tmp_path: Path) -> None:
    """Flip one bit in every 97th byte of each file."""
    path = make(tmp_path, 7)
    for name in ("a.pt", CHECKPOINT_FILE):
        whole = (path / name).read_bytes()
        for at in range(0, len(whole), 97):
            flip(path / name, at)
            with pytest.raises(BrokenFile):
                read_checkpoint(path)
            (path / name).write_bytes(whole)
        (path / name).unlink()
        with pytest.raises(BrokenFile, match=name):
            read_checkpoint(path)
        (path / name).write_bytes(whole)
    result = read_checkpoint(path)
    assert result.state == STATE and result.fits(2) and not result.fits(1)
    (path / "more.pt").touch()
    with pytest.raises(UserError, match="must contain only the files .*, got more.pt"):
        read_checkpoint(path)


def test_damaged_or_missing_frozen_weights_are_refused(tmp_path: Path) -> None:
    reason = f"{tmp_path} must have the frozen weights of the training, got"
    with pytest.raises(UserError, match=f"^{reason} cannot be read"):
        check_frozen(tmp_path)
    path = tmp_path / "frozen-00000.pt"
    files = {path.name: write_file({"weight": torch.arange(1000.0)}, path)}
    write_json(tmp_path / FROZEN_FILE, with_checksum({"files": files}))
    check_frozen(tmp_path)
    flip(path, 50)
    with pytest.raises(UserError, match=f"^{reason} {path.name} has a checksum"):
        check_frozen(tmp_path)


def test_find_intact_returns_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (2, 4, 6)]
    (tmp_path / ".step-000008.partial").mkdir()
    flip(paths[2] / "a.pt", 50)
    result, broken = find_intact(list_checkpoints(tmp_path))
    assert result is not None and result.step == 4
    assert broken == {paths[2]: "a.pt has a checksum mismatch: the file is corrupt"}
    for path in paths[:2]:
        (path / CHECKPOINT_FILE).unlink()
    with pytest.raises(UserError, match=r"got step-000006: a\.pt.*; step-000002"):
        find_intact(list_checkpoints(tmp_path))


def test_a_kill_leaves_no_half_model_directory(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: files copied from read-only data were read-only, so the next run could not write."""
    data, out = tmp_path / "data", tmp_path / "model"
    shutil.copytree(data_folder / "tokenizer", data / "tokenizer")
    for path in (data / "tokenizer").iterdir():
        path.chmod(0o444)

    def killed(source: Path, target: Path) -> None:
        target.write_text("{")
        raise RuntimeError

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(shutil, "copyfile", killed)
        write_architecture(tiny_llama(), data, out)
    assert not out.exists()
    write_architecture(tiny_llama(), data, out)
    assert (out / "tokenizer.json").read_bytes() != b"{"
    assert all(path.stat().st_mode & 0o200 for path in (out, *out.iterdir()))


def test_a_temperature_without_do_sample_is_kept(
    data_folder: Path, tmp_path: Path
) -> None:
    """Bug: Llama 2's first files have one; after loading the model the training ended in a traceback."""
    lm = tiny_llama()
    lm.generation_config.temperature = 0.9
    write_architecture(lm, data_folder, tmp_path / "model")
    described = read_json(tmp_path / "model" / "generation_config.json")
    assert described["temperature"] == 0.9 and "do_sample" not in described


def test_a_failed_write_raises_the_systems_error(tmp_path: Path) -> None:
    """On a full disk PyTorch's message is "unexpected pos 64 vs 0".

    The test limits the size of a file instead of filling a disk.
    """
    code = f"""
import resource, signal, torch
from pathlib import Path
from train.tensor_files import write_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    write_file(torch.rand(100_000), Path({str(tmp_path / "x.pt")!r}))
except OSError as error:
    print(error.errno, error.strerror)
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == f"27 {os.strerror(27)}"


def test_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    """Bug: checkpoints were sorted by name, so step 1,000,000 was the oldest and was removed."""
    for name in ("step-999750", "step-1000000", "step-999750.bak"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-1000000",
        "step-999750",
    ]
