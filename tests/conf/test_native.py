"""Test that the library of C functions is compiled once, and where its file cannot be used, again."""

import shutil
from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

from conf.devices import native
from conf.devices.native import FLAGS, built, library_key

pytestmark = [
    pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler"),
    pytest.mark.skipif(
        not Path("/proc/cpuinfo").is_file(), reason="libraries are not kept here"
    ),
]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small library's source, and an empty cache."""
    source = tmp_path / "source" / "native.c"
    source.parent.mkdir()
    source.write_text("int answer(void) { return 42; }")
    monkeypatch.setattr(native, "SOURCE", source)

    def folder(*names: str) -> Path:
        path = tmp_path.joinpath("cache", *names)
        path.mkdir(parents=True, exist_ok=True)
        return path

    monkeypatch.setattr("huggingface_hub.cached_assets_path", folder)
    return source


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The commands that were run."""
    commands = []
    run = native.subprocess.run

    def recorded(command: Sequence[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(native.subprocess, "run", recorded)
    return commands


def answer(library: CDLL | None) -> int:
    assert library is not None
    return int(library.answer())


def test_a_library_is_compiled_once(
    source: Path, commands: list[Sequence[str]], tmp_path: Path
) -> None:
    """Each start compiled for four seconds."""
    assert answer(built(["cc"])) == answer(built(["cc"])) == 42
    assert len(commands) == 1
    (folder,) = (tmp_path / "cache" / "adaptive-tokens" / "native").iterdir()
    assert [path.name for path in folder.iterdir()] == ["native.so"]


@pytest.mark.parametrize("file", ["native.c", "products.h"])
def test_changed_sources_are_compiled_again(
    source: Path, commands: list[Sequence[str]], file: str
) -> None:
    built(["cc"])
    source.with_name(file).write_text("int answer(void) { return 43; }")
    built(["cc"])
    assert len(commands) == 2


def test_a_file_of_another_system_is_compiled_again(
    source: Path, commands: list[Sequence[str]], tmp_path: Path
) -> None:
    """Machines may share a home folder."""
    key = library_key(["cc", *FLAGS, str(source), "-lm"])
    file = tmp_path.joinpath("cache", "adaptive-tokens", "native", key, "native.so")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\x7fELF of another system")
    assert answer(built(["cc"])) == 42
    assert len(commands) == 1


def test_without_a_cache_it_is_compiled_for_this_process(
    source: Path, commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder may be read-only."""

    def refused(*names: str) -> Path:
        raise PermissionError("read-only file system")

    monkeypatch.setattr("huggingface_hub.cached_assets_path", refused)
    assert answer(built(["cc"])) == answer(built(["cc"])) == 42
    assert len(commands) == 2


def test_with_a_full_cache_it_is_compiled_for_this_process(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: on a full home disk int8 was half as fast, and the warning asked for a compiler."""
    run = native.subprocess.run

    def full(command: Sequence[str], **options: Any) -> Any:
        if command[-1].startswith(str(tmp_path / "cache")):
            raise native.subprocess.CalledProcessError(1, command)
        return run(command, **options)

    monkeypatch.setattr(native.subprocess, "run", full)
    assert answer(built(["cc"])) == 42
    assert not list(tmp_path.glob("cache/*/*/*/*"))


def test_a_source_that_does_not_compile_leaves_nothing(
    source: Path, tmp_path: Path
) -> None:
    source.write_text("int answer(void) { return")
    assert built(["cc"]) is None
    assert not list(tmp_path.glob("cache/*/*/*/*"))
