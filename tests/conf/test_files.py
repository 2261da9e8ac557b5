"""Single files that a setting asks for: html= and out=. No test writes a device of this machine."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conf import UserError
from conf.files import file_to_write, write_bytes


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
        told = f"must be a regular file or a new one, got a {kind}. Give another file."
        with pytest.raises(UserError) as early:
            file_to_write("html", str(path))
        assert str(early.value) == f"html={path} {told}"
        with pytest.raises(UserError) as late:
            write_bytes(path, b"page")
        assert str(late.value) == f"{path} {told}"
        assert Path("special").stat().st_mode == mode
        assert len(list(tmp_path.iterdir())) == 1 + linked


def test_a_pipe_by_the_name_of_its_descriptor_is_refused() -> None:
    """`/dev/stdout` is a link to a name that no file has."""
    reader, writer = os.pipe()
    with pytest.raises(UserError, match="must be a regular file or a new one, got a pipe"):
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
    assert [one.name for one in target.parent.iterdir()] == ["page.html"]


def test_a_file_that_is_mounted_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker -v page.html:/page.html`: no rename replaces it, which was found when all was done."""
    path = tmp_path / "page.html"
    path.touch()
    monkeypatch.setattr("conf.files.is_mount_point", lambda place: place == path)
    with pytest.raises(UserError, match="must be a file that can be replaced, got a mount point"):
        file_to_write("html", str(path))


def test_a_name_without_room_for_the_unfinished_file_is_refused_before_any_work(tmp_path: Path) -> None:
    """A name of 250 bytes was told as too long when the text had been decoded."""
    with pytest.raises(
        UserError, match="^html=.* must be a file in a folder that can be written, got 'File name too long'"
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
