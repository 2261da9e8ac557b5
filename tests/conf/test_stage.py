import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from conf import UserError
from conf.files import file_to_write, write_json
from conf.fingerprint import fingerprint
from conf.stage import (
    BEGUN,
    MANIFEST,
    ROOT,
    begun,
    check_out,
    commit,
    create_folder,
    is_finished,
    lock,
    made_from,
    partial_of,
    publish,
    read_manifest,
    staged,
    write_manifest,
)
from tests.full_disk import largest_file


@dataclass
class Inner:
    path: str = "somewhere"
    size: int = 3


@dataclass
class Settings:
    out: str = "out"
    steps: int = 5
    data: Inner = field(default_factory=Inner)


def test_a_stage_is_finished_once_its_manifest_is_there(tmp_path: Path) -> None:
    made = made_from(Settings(), {})
    assert not is_finished(tmp_path, "thing", made)
    write_manifest(tmp_path, "thing", made, facts=1)
    assert is_finished(tmp_path, "thing", made)
    assert read_manifest(tmp_path, "thing", "data.path")["facts"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_where_an_input_lies_does_not_count_but_what_made_it_does(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write_manifest(first, "shards", {})
    second.mkdir()
    (second / MANIFEST).write_bytes((first / MANIFEST).read_bytes())
    made = [made_from(Settings(data=Inner(str(p))), {"data.path": p}) for p in (first, second)]
    assert made[0] == made[1]
    assert made[0]["inputs"] == {"data.path": fingerprint(first)}
    assert made[0]["settings"] == {"steps": 5, "data": {"size": 3}}


def test_a_result_of_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    write_manifest(tmp_path, "thing", made_from(Settings(), {}))
    with pytest.raises(UserError, match=r"with data\.size=3; requested data\.size=4"):
        is_finished(tmp_path, "thing", made_from(Settings(data=Inner(size=4)), {}))


def test_a_folder_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got no such folder"):
        read_manifest(tmp_path / "absent", "shards", "data.path")
    with pytest.raises(UserError, match=r"data\.path=.*got no manifest\.json"):
        read_manifest(tmp_path, "shards", "data.path")
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="must be a JSON object"):
        read_manifest(tmp_path, "shards", "data.path")
    write_manifest(tmp_path, "model", {})
    with pytest.raises(UserError, match="must be a finished folder of kind 'shards', got kind 'model'"):
        read_manifest(tmp_path, "shards", "data.path")


def test_a_folder_becomes_visible_whole_or_not_at_all(tmp_path: Path) -> None:
    """Shards of an interrupted run lay beside those of the next one, and were read with them."""
    out = tmp_path / "out"
    partial_of(out).mkdir()
    (partial_of(out) / "shard").write_text("stale")
    with staged(out) as partial:
        assert not list(partial.iterdir())
        (partial / "other").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UserError, match="must be a new or empty folder"), staged(out):
        pass


def test_a_stage_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """An export that was refused at its last check left all weights in a hidden folder until the next try."""
    with pytest.raises(RuntimeError), staged(tmp_path / "out") as partial:
        (partial / "weights").write_text("large")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_two_runs_never_write_one_folder(tmp_path: Path) -> None:
    """A run that was still dying and its successor shared the partial folder: the result lacked shards."""
    out = tmp_path / "out"
    with staged(out) as partial:
        (partial / "shard").write_text("whole")
        with pytest.raises(UserError, match="another run is writing it"), staged(out):
            pass
    assert (out / "shard").read_text() == "whole"


def test_a_run_that_ends_while_another_begins_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that asked for the lock as the other let it go was a traceback: the folder had been renamed."""
    out, first = tmp_path / "out", staged(tmp_path / "out")
    (first.__enter__() / "shard").write_text("whole")

    def ends_before(folder: Path, out: Path) -> int:
        first.__exit__(None, None, None)
        return os.open(out, os.O_RDONLY)

    monkeypatch.setattr("conf.stage.lock", ends_before)
    with pytest.raises(UserError, match="must be a new or empty folder"), staged(out):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "shard"]


@pytest.mark.parametrize("out", ["", ".", "/", "..", "model/.."])
def test_a_folder_without_a_name_is_refused(out: str) -> None:
    """out= and out=. were tracebacks: "PosixPath('.') has an empty name"."""
    with pytest.raises(UserError, match=f"^out={out} must be a folder with a name, got"):
        is_finished(out, "shards", {})
    with pytest.raises(UserError, match="must be a folder with a name"), staged(out):
        pass


def test_a_file_in_the_folders_place_is_told_at_once(tmp_path: Path) -> None:
    """It was told after all else had been read, where the writing begins."""
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "speed"):
        told = f"^out={out} must be a new or empty folder, got the file {file}. Use"
        with pytest.raises(UserError, match=told):
            is_finished(out, "shards", {})
        with pytest.raises(UserError, match="got the file"), staged(out):
            pass
    assert file.read_text() == "mine"
    assert not is_finished(tmp_path / "new" / "folder", "shards", {})


def test_what_killed_writers_of_a_file_have_left_goes_with_the_next(tmp_path: Path) -> None:
    """Each left a hidden file: they piled up in reports, and were published with the units of a result."""
    here = f".report.json.{platform.node()}"
    dead, living = f"{here}.1", f"{here}.2"
    others = (".report.json.elsewhere.1", f".other.json.{platform.node()}.1")
    for name in (dead, living, *others):
        (tmp_path / name).write_text('{"half')
    with open(tmp_path / living) as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        write_json(tmp_path / "report.json", {"whole": True})
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", living, *others}


def test_a_killed_writer_is_dead_before_its_parent_has_heard_of_it(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_folder_that_another_run_removes_is_never_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The lock was that of a folder without a name: a run went on in a new one beside it, which none locked."""
    folder = tmp_path / "partial"
    folder.mkdir()
    if moment == "before it is opened":
        folder.rmdir()
    else:
        monkeypatch.setattr(fcntl, "flock", lambda *_: folder.rmdir())
    with pytest.raises(UserError, match="another run is writing it"):
        lock(folder, "out")


def test_a_folder_made_visible_by_a_run_killed_right_then_is_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its begun.json stayed for ever in a result of infer.speed or infer.quality."""
    out, made = tmp_path / "out", {"settings": {"steps": 5}}
    with monkeypatch.context() as patch, pytest.raises(RuntimeError), begun(out, made) as partial:
        write_manifest(partial, "thing", made)
        patch.setattr(Path, "unlink", Mock(side_effect=RuntimeError))
        publish(partial)
    assert (out / BEGUN).is_file()
    assert is_finished(out, "thing", made)
    assert [path.name for path in out.iterdir()] == [MANIFEST]


def test_what_cannot_be_written_leaves_nothing_and_is_named(tmp_path: Path) -> None:
    """A full disk left .run.json.4711 behind, and was told of no file: "out=: No space left on device"."""
    path = tmp_path / "run.json"
    write_json(path, "old")
    with largest_file(1000), pytest.raises(OSError) as error:
        write_json(path, "x" * 2000)
    assert error.value.filename == str(path) and error.value.errno == errno.EFBIG
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"] and path.read_text() == '"old"\n'


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    """A text was decoded, and then its page found no place."""
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match=f"^html={tmp_path}/x.html must be a file in a folder that can be"):
        file_to_write("html", f"{tmp_path}/x.html")
    tmp_path.chmod(0o755)
    assert file_to_write("html", f"{tmp_path}/x.html") == tmp_path / "x.html"


def test_what_was_begun_is_kept_for_its_own_settings_alone(tmp_path: Path) -> None:
    """What others had begun in the folder was deleted without a word."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), begun(out, {"settings": {"seed": 0}}) as partial:
        (partial / "work").write_text("of hours")
        raise KeyboardInterrupt
    with (
        pytest.raises(UserError, match="already contains an unfinished run with seed=0; requested seed=1"),
        begun(out, {"settings": {"seed": 1}}),
    ):
        pass
    with begun(out, {"settings": {"seed": 0}}) as partial:
        assert (partial / "work").read_text() == "of hours"


def test_a_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a FileNotFoundError, in training at the very end."""
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"


@pytest.mark.parametrize("target", ["there", "below/that is not there"])
def test_a_link_stays_and_its_target_becomes_the_result(target: str, tmp_path: Path) -> None:
    """out= as a link to a folder ended in NotADirectoryError after all the work, and an export was deleted."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "out"
    link.symlink_to(tmp_path / target)
    assert not is_finished(link, "thing", {})
    with staged(link) as partial:
        assert not (link / "weights").exists()
        (partial / "weights").write_text("large")
        write_manifest(partial, "thing", {})
    assert link.is_symlink() and is_finished(link, "thing", {})
    assert {path.name for path in (tmp_path / target).iterdir()} == {"weights", MANIFEST}
    assert not list(tmp_path.glob("**/.*"))


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that no rename replaces."""
    out = tmp_path / "mounted"
    (out / "lost+found").mkdir(parents=True)
    monkeypatch.setattr("conf.stage.is_mount_point", lambda path: path == out)
    return out


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lost+found")


def test_in_a_mount_point_nothing_is_visible_before_it_is_whole(mounted: Path) -> None:
    """`docker -v` on out= ended in "Device or resource busy" after all the work."""
    with pytest.raises(RuntimeError), staged(mounted) as partial:
        (partial / "weights").write_text("half")
        raise RuntimeError
    assert names(mounted) == []
    with staged(mounted) as partial:
        (partial / "weights").write_text("large")
        write_manifest(partial, "thing", {})
        assert names(mounted) == [partial.name]
        with pytest.raises(UserError, match="another run is writing it"), staged(mounted):
            pass
    assert is_finished(mounted, "thing", {})
    assert names(mounted) == [MANIFEST, "weights"]


def test_in_a_mount_point_what_was_begun_is_gone_on_with(mounted: Path) -> None:
    made = {"settings": {"seed": 0}}
    with pytest.raises(KeyboardInterrupt), begun(mounted, made) as partial:
        (partial / "work").write_text("of hours")
        raise KeyboardInterrupt
    check_out(mounted)
    with begun(mounted, made) as partial:
        assert (partial / "work").read_text() == "of hours"
        write_manifest(partial, "thing", made)
        publish(partial)
    assert names(mounted) == [MANIFEST, "work"]


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_publication_that_was_killed_is_completed(
    moves: int, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is moved last: what a kill leaves is no result until the next run has completed it."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), staged(mounted) as partial:
        for name in ("a", "b"):
            (partial / name).write_text(name)
        write_manifest(partial, "thing", {})
        rename, left = Path.rename, [None] * moves

        def killed(path: Path, target: Path) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop()
            rename(path, target)

        patch.setattr(Path, "rename", killed)
    assert not (mounted / MANIFEST).exists()
    assert is_finished(mounted, "thing", {})
    assert names(mounted) == ["a", "b", MANIFEST]


def test_a_folder_below_one_that_cannot_be_written_is_written_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that an administrator had made for a user was refused: nothing can be made beside it."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr("conf.stage.os.access", lambda path, mode: path != tmp_path)
    with staged(out) as partial:
        assert partial.parent == out


def test_a_result_that_cannot_be_made_visible_is_kept_and_named(tmp_path: Path) -> None:
    """Files that came into out= while the result was made ended in a traceback, and an export was deleted."""
    out = tmp_path / "out"
    with (
        pytest.raises(
            UserError, match=f"The result is whole in {tmp_path}/.out.partial: move it to another place.$"
        ),
        staged(out) as partial,
    ):
        (partial / "weights").write_text("large")
        out.mkdir()
        (out / "notes").write_text("mine")
    assert (partial / "weights").read_text() == "large"
    assert (out / "notes").read_text() == "mine"


STAGE = """
import sys
from conf.stage import is_finished, staged, write_manifest
with staged(sys.argv[1]) as partial:
    (partial / "weights").write_text("large")
    write_manifest(partial, "thing", {})
assert is_finished(sys.argv[1], "thing", {})
"""


@pytest.mark.parametrize("mount", ["mount -t tmpfs tmpfs out", "mount --bind other out"])
def test_a_real_mount_point_holds_the_result(mount: str, tmp_path: Path) -> None:
    """A folder that `docker -v` binds may be of the same file system: `os.path.ismount` sees none."""
    for name in ("out", "other"):
        (tmp_path / name).mkdir()
    if subprocess.run(["unshare", "-m", "bash", "-c", mount], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("this user cannot mount")
    command = f'{mount} && "{sys.executable}" -c "$STAGE" out && ls -A out && umount out && ls -A .'
    env = {**os.environ, "STAGE": STAGE, "PYTHONPATH": str(ROOT)}
    end = subprocess.run(
        ["unshare", "-m", "bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (end.returncode, end.stderr) == (0, "")
    assert end.stdout.split() == [MANIFEST, "weights", "other", "out"]


def test_a_mount_that_cannot_be_written_is_one_sentence_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    mount = "mount -t tmpfs -o ro tmpfs out"
    if subprocess.run(["unshare", "-m", "bash", "-c", mount], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("this user cannot mount")
    command = f'{mount} && "{sys.executable}" -c "$STAGE" out'
    env = {**os.environ, "STAGE": STAGE, "PYTHONPATH": str(ROOT)}
    end = subprocess.run(
        ["unshare", "-m", "bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert end.stderr.splitlines()[-1] == (
        "conf.errors.UserError: out=out must be a folder that can be created, got 'Read-only file system'. "
        "Use another out="
    )


def test_a_folder_that_cannot_be_created_is_one_sentence(tmp_path: Path) -> None:
    """`out=/proc/x` was a traceback of every rank."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^out=a must be a folder that can be created, got '.+'. Use another"):
        create_folder(tmp_path / "file" / "x", "a")
