"""What is read of a data folder is what was written."""

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conf import UserError
from data_prep.shards import Shards


@pytest.fixture
def folder(data_folder: Path, tmp_path: Path) -> Path:
    """A copy of the data folder, to be damaged."""
    return Path(shutil.copytree(data_folder, tmp_path / "data"))


def rewrite_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    del manifest["crc32"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", ["tokens", "spans", "names"])
def test_a_changed_bit_is_found_when_its_sequence_is_read(
    data_folder: Path, folder: Path, kind: str
) -> None:
    """A token that a disk or a copy had changed was trained on without a word."""
    path = folder / f"train-00000.{kind}.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last sequence, or of its document's id
    path.write_bytes(data)
    shards = Shards(folder, "train")
    assert shards[0].ids == Shards(data_folder, "train")[0].ids
    with pytest.raises(
        UserError,
        match=rf"tokens\.npy: checksum mismatch of sequence {len(shards) - 1}",
    ):
        list(shards)


@pytest.mark.parametrize("kind", ["tokens", "spans", "names", "sums"])
@pytest.mark.parametrize("damage", ["absent", "empty", "another"])
def test_files_of_a_shard_are_those_of_the_manifest(
    folder: Path, kind: str, damage: str
) -> None:
    """With a shard lost a run trained on the others."""
    path = folder / f"train-00000.{kind}.npy"
    if damage == "another":
        for other in ("tokens", "sums"):
            held_out = folder / f"held_out-00000.{other}.npy"
            shutil.copy(held_out, folder / f"train-00000.{other}.npy")
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    with pytest.raises(
        UserError, match="must (be what its|have shards .* its) manifest"
    ):
        Shards(folder, "train")


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """As few more open files as the soft limit gives this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 40
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + few, hard)
    )
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_shards_than_a_shell_lets_a_process_open(
    data_folder: Path, folder: Path, few_open_files: int
) -> None:
    """From 255 shards on, 17B tokens, training ended with "Too many open files"."""
    rewrite_manifest(
        folder,
        lambda manifest: manifest["train"]["shards"].extend(
            manifest["train"]["shards"] * (few_open_files // 2 - 1)
        ),
    )
    for path in list(folder.glob("train-00000.*.npy")):
        for index in range(1, few_open_files // 2):
            (folder / path.name.replace("00000", f"{index:05d}")).symlink_to(path)
    assert len(Shards(folder, "train")) == few_open_files // 2 * len(
        Shards(data_folder, "train")
    )
