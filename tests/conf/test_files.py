"""Atomic writes, and JSON with a checksum."""

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import UserError
from conf.runs.files import (
    Corrupt,
    check_regular,
    read_checksummed,
    read_json,
    with_checksum,
    write_bytes,
    write_json,
)
from conf.runs.stage import read_manifest, write_manifest
from tests.full_disk import largest_file


@pytest.mark.parametrize("exists", [True, False])
def test_a_links_target_is_written_and_keeps_its_mode(
    exists: bool, tmp_path: Path
) -> None:
    link, target = tmp_path / "link.html", tmp_path / "below" / "page.html"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
        target.chmod(0o600)
    link.symlink_to(target)
    write_bytes(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]
    assert not exists or target.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, "old")
    with largest_file(1000), pytest.raises(OSError) as error:
        write_json(path, "x" * 2000)
    assert error.value.filename == str(path) and error.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == '"old"\n'


VALUE: dict[str, Any] = {
    "a": [1, 2.5, None],
    "b": {10: "x", 9: "y"},
    "half of a pair": "\udcff\ud800",
}


@given(st.data())
def test_every_changed_byte_is_detected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("files") / "x.json"
    write_json(path, with_checksum(VALUE))
    whole, expected = path.read_bytes(), read_checksummed(path)
    assert expected == json.loads(json.dumps(VALUE))
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(changed)
    with contextlib.suppress(Corrupt):
        assert (
            read_checksummed(path) == expected
        )  # the byte was whitespace, or part of an escape


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "[" * 100_000])
def test_a_file_without_its_checksum_is_corrupt(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(Corrupt, match="cannot be read|has a checksum mismatch"):
        read_checksummed(tmp_path / "x.json")


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, "shards", {"settings": {}}, seq_len=128)
    assert read_manifest(tmp_path, "shards", "data.path")["seq_len"] == 128
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace("128", "129"))
    with pytest.raises(UserError, match="checksum mismatch: the file was edited"):
        read_manifest(tmp_path, "shards", "data.path")
    path.write_text('{"kind": "shards"}')  # of an earlier version
    assert read_manifest(tmp_path, "shards", "data.path") == {"kind": "shards"}


def test_a_fifo_or_a_broken_link_is_refused_and_never_opened(tmp_path: Path) -> None:
    """A command that opened a FIFO among a model's files blocked forever."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.bin").symlink_to(tmp_path / "gone")  # no code reads it
    (tmp_path / "link.json").symlink_to(tmp_path / "config.json")
    check_regular(tmp_path, "model", ["adapter"])
    head = tmp_path / "adapter" / "head.safetensors"
    os.mkfifo(head)
    with pytest.raises(
        UserError, match=f"^model={tmp_path} .* {head}, a FIFO or device"
    ):
        check_regular(tmp_path, "model", ["adapter"])
    head.unlink()
    head.symlink_to(head)
    with pytest.raises(UserError, match=f"{head}, a broken link. Remove it"):
        check_regular(tmp_path, "model", ["adapter"])
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(
        UserError, match="must be a JSON object, got a folder, FIFO or device"
    ):
        read_json(tmp_path / "manifest.json")
