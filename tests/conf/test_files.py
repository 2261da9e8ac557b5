"""Single files that a setting asks for, html= and out=; JSON that says whether it is whole.

No test writes a device of this machine.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import UserError
from conf.files import (
    Corrupt,
    file_to_write,
    read_checksummed,
    read_result,
    with_checksum,
    write_bytes,
    write_json,
)
from conf.stage import read_manifest, write_manifest
from tests.full_disk import largest_file


@contextmanager
def special(path: Path, kind: str) -> Iterator[None]:
    """A pipe, a socket or a device of our own at `path`."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, 0o20666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            yield
        return
    yield


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_regular_file_is_refused_before_any_work(
    kind: str, linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """html=/dev/null as root replaced the machine's device by a page."""
    monkeypatch.chdir(tmp_path)  # a socket's name is at most 107 bytes
    path = Path("special")
    with special(path, kind):
        mode = path.stat().st_mode
        if linked:
            Path("link").symlink_to(path)
            path = Path("link")
        message = (
            f"must be a regular file or a new one, got a {kind}. Give another file."
        )
        with pytest.raises(UserError) as early:
            file_to_write("html", str(path))
        assert str(early.value) == f"html={path} {message}"
        with pytest.raises(UserError) as late:
            write_bytes(path, b"page")
        assert str(late.value) == f"{path} {message}"
        assert Path("special").stat().st_mode == mode
        assert len(list(tmp_path.iterdir())) == 1 + linked


def test_a_pipe_by_the_name_of_its_descriptor_is_refused() -> None:
    """`/dev/stdout` is a link to a name that no file has."""
    reader, writer = os.pipe()
    with pytest.raises(
        UserError, match="must be a regular file or a new one, got a pipe"
    ):
        file_to_write("html", f"/proc/self/fd/{writer}")
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(exists: bool, tmp_path: Path) -> None:
    """A link to a page elsewhere became a file, and the page stayed as it was."""
    link, target = tmp_path / "link.html", tmp_path / "below" / "page.html"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    path = file_to_write("html", str(link))
    assert path == link
    write_bytes(path, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert [item.name for item in target.parent.iterdir()] == ["page.html"]


def test_a_file_that_is_mounted_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker -v page.html:/page.html`: no rename replaces it, which was found when all was done."""
    path = tmp_path / "page.html"
    path.touch()
    monkeypatch.setattr("conf.files.is_mount_point", lambda place: place == path)
    with pytest.raises(
        UserError, match="must be a file that can be replaced, got a mount point"
    ):
        file_to_write("html", str(path))


def test_a_name_without_room_for_the_unfinished_file_is_refused_before_any_work(
    tmp_path: Path,
) -> None:
    """A name of 250 bytes was refused as too long only when the text had been decoded."""
    with pytest.raises(
        UserError,
        match="^html=.* must be a file in a folder that can be written, got 'File name too long'",
    ):
        file_to_write("html", f"{tmp_path}/{'y' * 250}")
    assert not list(tmp_path.iterdir())


def test_a_new_file_can_be_read_by_whom_the_old_one_could(tmp_path: Path) -> None:
    """A report that its owner had closed to others was open to all after it was written again."""
    path = tmp_path / "report.html"
    write_bytes(path, b"old")
    path.chmod(0o600)
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600


def test_what_killed_writers_of_a_file_have_left_goes_with_the_next(
    tmp_path: Path,
) -> None:
    """Each left a hidden file: they piled up in reports, and were published with the units of a result."""
    here = f".report.json.{platform.node()}"
    dead, living = f"{here}.1", f"{here}.2"
    others = (".report.json.elsewhere.1", f".other.json.{platform.node()}.1")
    for name in (dead, living, *others):
        (tmp_path / name).write_text('{"half')
    with open(tmp_path / living) as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        write_json(tmp_path / "report.json", {"whole": True})
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.json",
        living,
        *others,
    }


def test_a_killed_writer_is_dead_before_its_parent_has_heard_of_it(
    tmp_path: Path,
) -> None:
    """A rerun right after a kill took the zombie for alive, and a unit's hidden file stayed in the result."""
    left = tmp_path / f".unit.json.{platform.node()}.1"
    with open(left, "w") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        zombie = subprocess.Popen(["sleep", "100"], pass_fds=[writer.fileno()])
    write_json(tmp_path / "unit.json", {"whole": False})
    assert left.exists(), "its writer lives"
    zombie.kill()
    while psutil.Process(zombie.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    write_json(tmp_path / "unit.json", {"whole": True})
    zombie.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["unit.json"]


def test_writers_of_the_same_process_number_do_not_meet(tmp_path: Path) -> None:
    """The process's number named the hidden file and said whether its writer lives: two containers that share
    a folder and a host's name number their processes alike, and each took or removed the other's file.
    """

    def write(writer: int) -> None:
        for turn in range(50):
            write_json(tmp_path / "unit.json", {"writer": writer, "turn": turn})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert json.loads((tmp_path / "unit.json").read_text())["turn"] == 49
    assert [path.name for path in tmp_path.iterdir()] == ["unit.json"]


def test_what_cannot_be_written_leaves_nothing_and_is_named(tmp_path: Path) -> None:
    """A full disk left .run.json.4711 behind, and the error named no file: "out=: No space left on device"."""
    path = tmp_path / "run.json"
    write_json(path, "old")
    with largest_file(1000), pytest.raises(OSError) as error:
        write_json(path, "x" * 2000)
    assert error.value.filename == str(path) and error.value.errno == errno.EFBIG
    assert [item.name for item in tmp_path.iterdir()] == [
        "run.json"
    ] and path.read_text() == '"old"\n'


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_reported_before_the_work(
    tmp_path: Path,
) -> None:
    """A text was decoded, and then its page found no place."""
    tmp_path.chmod(0o555)
    with pytest.raises(
        UserError,
        match=f"^html={tmp_path}/x.html must be a file in a folder that can be",
    ):
        file_to_write("html", f"{tmp_path}/x.html")
    tmp_path.chmod(0o755)
    assert file_to_write("html", f"{tmp_path}/x.html") == tmp_path / "x.html"


VALUE: dict[str, Any] = {
    "a": [1, 2.5, None],
    "b": {10: "x", 9: "y"},
    "half of a pair": "\udcff\ud800",
}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Half of a surrogate pair, as a benchmark's id may have, was a UnicodeEncodeError; that of a file's name
    was written as bytes that no reader took.
    """
    write_json(tmp_path / "x.json", with_checksum(VALUE))
    assert (
        read_checksummed(tmp_path / "x.json")
        == read_result(tmp_path / "x.json")
        == json.loads(json.dumps(VALUE))
    )


@given(st.data())
def test_no_change_of_a_byte_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("files") / "x.json"
    write_json(path, with_checksum(VALUE))
    whole, expected = path.read_bytes(), read_checksummed(path)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(changed)
    with contextlib.suppress(Corrupt):
        assert read_checksummed(path) == expected  # a space, or a letter of an escape


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"a": 1}', '{"crc32": 1}', "[" * 100_000, "\ufeff{}"]
)
def test_what_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(Corrupt, match="cannot be read|has another checksum"):
        read_checksummed(tmp_path / "x.json")


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    """A digit of it was another setting, another id or another step, and a field less a KeyError later on."""
    write_manifest(tmp_path, "shards", {"settings": {}}, seq_len=128)
    assert read_manifest(tmp_path, "shards", "data.path")["seq_len"] == 128
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace("128", "129"))
    with pytest.raises(
        UserError, match="manifest.json must be as it was written, got it changed since"
    ):
        read_manifest(tmp_path, "shards", "data.path")
    path.write_text('{"kind": "shards"}')  # of an earlier version
    assert read_manifest(tmp_path, "shards", "data.path") == {"kind": "shards"}
