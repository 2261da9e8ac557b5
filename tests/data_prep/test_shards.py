"""What is read of a data folder is what was written."""

import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conf import UserError
from data_prep.shards import Shards


def copied(data_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data_folder, tmp_path / "data"))


@pytest.mark.parametrize("kind", ["tokens", "spans", "names"])
def test_a_changed_bit_is_found_when_its_sequence_is_read(data_folder: Path, tmp_path: Path, kind: str) -> None:
    """A token that a disk or a copy had changed was trained on without a word."""
    folder = copied(data_folder, tmp_path)
    path = folder / f"train-00000.{kind}.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last sequence, or of its document's id
    path.write_bytes(data)
    shards = Shards(folder, "train")
    assert shards[0].ids == Shards(data_folder, "train")[0].ids
    with pytest.raises(UserError, match=rf"tokens\.npy: checksum mismatch of sequence {len(shards) - 1}"):
        list(shards)


def test_shards_are_those_of_the_manifest(data_folder: Path, tmp_path: Path) -> None:
    """With a shard lost a run trained on the others."""
    folder = copied(data_folder, tmp_path)
    for kind in ("tokens", "spans", "names", "sums"):
        shutil.copy(folder / f"held_out-00000.{kind}.npy", folder / f"train-00000.{kind}.npy")
    with pytest.raises(UserError, match=r"train-00000\.tokens\.npy must be what its manifest says"):
        Shards(folder, "train")
    (folder / "train-00000.tokens.npy").unlink()
    with pytest.raises(UserError, match="must have the 1 shards of split .train. that its manifest lists"):
        Shards(folder, "train")


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY\x01\x00v\x00{'descr': (" + 106 * b" "])
def test_a_file_that_is_none_of_numpys_is_told(data_folder: Path, tmp_path: Path, data: bytes) -> None:
    """It was an EOFError, or an error of the tokenizer of Python's own source."""
    folder = copied(data_folder, tmp_path)
    (folder / "train-00000.spans.npy").write_bytes(data)
    with pytest.raises(UserError, match=r"train-00000\.spans\.npy must be a readable shard, got "):
        Shards(folder, "train")


def test_sums_are_those_that_the_manifest_knows(data_folder: Path, tmp_path: Path) -> None:
    folder = copied(data_folder, tmp_path)
    path = folder / "train-00000.sums.npy"
    np.save(path, np.load(path) ^ 1)
    with pytest.raises(UserError, match=r"train-00000\.sums\.npy: checksum mismatch"):
        Shards(folder, "train")


def test_a_folder_of_before_there_were_sums_is_read(data_folder: Path, tmp_path: Path) -> None:
    folder = copied(data_folder, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    for split in ("train", "held_out"):
        manifest[split]["shards"] = [
            {name: value for name, value in shard.items() if name != "sums"}
            for shard in manifest[split]["shards"]
        ]
        (folder / f"{split}-00000.sums.npy").unlink()
    manifest.pop("crc32", None)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert [one.ids for one in Shards(folder, "train")] == [one.ids for one in Shards(data_folder, "train")]


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """As few more open files as the soft limit gives this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_shards_than_a_shell_lets_a_process_open(
    data_folder: Path, tmp_path: Path, few_open_files: int
) -> None:
    """From 255 shards on, 17B tokens, training ended with "Too many open files"."""
    folder = copied(data_folder, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["train"]["shards"] *= few_open_files // 2
    manifest.pop("crc32")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in list(folder.glob("train-00000.*.npy")):
        for index in range(1, few_open_files // 2):
            (folder / path.name.replace("00000", f"{index:05d}")).symlink_to(path)
    assert len(Shards(folder, "train")) == few_open_files // 2 * len(Shards(data_folder, "train"))
