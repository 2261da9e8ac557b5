"""Shards are read as they were written, and damage is detected."""

import resource
import shutil
from pathlib import Path

import pytest

from conf.errors import UserError
from data_prep.shards import Shards


@pytest.fixture
def folder(data_folder: Path, tmp_path: Path) -> Path:
    """A copy of the data folder that the test may damage."""
    return Path(shutil.copytree(data_folder, tmp_path / "data"))


@pytest.mark.parametrize("kind", ["tokens", "spans", "names"])
def test_a_changed_bit_is_detected_when_its_sequence_is_read(
    data_folder: Path, folder: Path, kind: str
) -> None:
    """A run trained silently on a token that a disk or a copy had changed."""
    path = folder / f"train-00000.{kind}.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last sequence, or in its document's id
    path.write_bytes(data)
    shards = Shards(folder, "train")
    assert shards[0].ids == Shards(data_folder, "train")[0].ids
    with pytest.raises(
        UserError,
        match=rf"tokens\.npy: checksum mismatch of sequence {len(shards) - 1}",
    ):
        list(shards)


@pytest.mark.parametrize("kind", ["tokens", "spans", "names", "sums"])
def test_the_files_of_a_shard_must_match_the_manifest(folder: Path, kind: str) -> None:
    """If a shard was missing, a run trained on the rest."""
    path = folder / f"train-00000.{kind}.npy"
    for damage in (lambda: path.write_bytes(b""), path.unlink):
        damage()
        with pytest.raises(UserError, match="must (match|have all).* its manifest"):
            Shards(folder, "train")


def test_more_shards_than_a_shell_lets_a_process_open(data_folder: Path) -> None:
    """From 255 shards on, training ended with "Too many open files"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    Shards(data_folder, "train")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
