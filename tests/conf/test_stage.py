"""Output folders: complete or absent, written by one run, with recorded settings and inputs."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conf.errors import UserError
from conf.runs.fingerprint import fingerprint
from conf.runs.stage import (
    MANIFEST,
    atomic_folder,
    check_out,
    collect_provenance,
    is_finished,
    partial_of,
    publish,
    read_manifest,
    start_run,
    write_manifest,
)


@dataclass
class Inner:
    path: str = "somewhere"
    size: int = 3


@dataclass
class Settings:
    out: str = "out"
    steps: int = 5
    data: Inner = field(default_factory=Inner)


def test_provenance_depends_on_the_content_of_inputs_not_their_paths(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write_manifest(first, "shards", {})
    second.mkdir()
    (second / MANIFEST).write_bytes((first / MANIFEST).read_bytes())
    built = [
        collect_provenance(Settings(data=Inner(str(path))), {"data.path": path})
        for path in (first, second)
    ]
    assert built[0] == built[1]
    assert built[0]["inputs"] == {"data.path": fingerprint(first)}
    assert built[0]["settings"] == {"steps": 5, "data": {"size": 3}}
    write_manifest(tmp_path / "out", "thing", built[0])
    assert is_finished(tmp_path / "out", "thing", built[1])
    built[1]["settings"]["data"]["size"] = 4
    with pytest.raises(UserError, match=r"with data\.size=3; requested data\.size=4"):
        is_finished(tmp_path / "out", "thing", built[1])


@pytest.mark.parametrize("finished", [True, False])
def test_a_result_is_not_reused_without_one_of_its_inputs(
    finished: bool, out: Path
) -> None:
    """Bug: a report with draft=DIR, or a training with data.own=DIR, was taken as the result of the command
    without that setting. An unfinished run was continued without it, so its records were of both kinds.
    """
    facts = {"settings": {"path": None}, "inputs": {"draft": "f00d"}}
    with start_run(out, facts) as partial:
        (partial / "record.json").touch()
        if finished:
            write_manifest(partial, "thing", facts)
            publish(partial)
    facts["inputs"] = {}
    with pytest.raises(UserError, match=r"inputs\.draft=f00d; requested inputs\.draft"):
        if not is_finished(out, "thing", facts):
            with start_run(out, facts):
                pass


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, r"data\.path=.*got no manifest\.json"),
        ("{", "must be a JSON object"),
        ("[]", r"must be a JSON object, got \[\]"),
        ('{"kind": "model"}', "folder of kind 'shards', got kind 'model'"),
    ],
)
def test_a_folder_that_is_not_finished_is_refused(
    tmp_path: Path, manifest: str | None, message: str
) -> None:
    with pytest.raises(UserError, match="got no such folder"):
        read_manifest(tmp_path / "absent", "shards", "data.path")
    # For an existing file the message was "no such folder".
    (tmp_path / "chat.jsonl").write_text("{}")
    with pytest.raises(UserError, match="got a file. .* by python -m data_prep data"):
        read_manifest(tmp_path / "chat.jsonl", "shards", "data.path")
    (tmp_path / "chat.jsonl").unlink()
    if manifest:
        (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(UserError, match=message):
        read_manifest(tmp_path, "shards", "data.path")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The path of a folder that does not exist yet."""
    return tmp_path / "out"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_mount_point_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == str(out))
    with (
        pytest.raises(UserError, match="must not be a mount point"),
        atomic_folder(out),
    ):
        pass
    with atomic_folder(out / "data"):
        pass


def test_a_complete_folder_becomes_visible_and_only_one_run_writes_it(
    out: Path, tmp_path: Path
) -> None:
    partial_of(out).mkdir()
    (partial_of(out) / "shard").write_text("stale")
    with atomic_folder(out) as partial:
        assert not list(partial.iterdir())
        (partial / "weights").write_text("large")
        write_manifest(partial, "thing", {})
        assert not (out / "weights").exists()
        with (
            pytest.raises(UserError, match="another run is writing it"),
            atomic_folder(out),
        ):
            pass
    assert is_finished(out, "thing", {}) and names(out) == [MANIFEST, "weights"]
    # Bug: the message advised to delete the folder, which may be the command's own input.
    with pytest.raises(UserError, match=r"requested kind=model\. Use another out=$"):
        is_finished(out, "model", {})
    assert names(tmp_path) == ["out"]
    with (
        pytest.raises(UserError, match="must be a new or empty folder"),
        atomic_folder(out),
    ):
        pass


def test_an_error_before_any_work_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with pytest.raises(UserError), start_run(out, {"settings": {"bos": "wrong"}}):
        raise UserError("vocab.bos must be a piece of the tokenizer")
    assert list(tmp_path.iterdir()) == []
    with start_run(out, {"settings": {"bos": "right"}}):
        pass


def test_an_interrupted_run_continues_only_with_its_own_settings(out: Path) -> None:
    facts = {"settings": {"seed": 0}}
    with pytest.raises(KeyboardInterrupt), start_run(out, facts) as partial:
        (partial / "work").write_text("of hours")
        raise KeyboardInterrupt
    check_out(out)
    changed = pytest.raises(UserError, match="with seed=0; requested seed=1")
    with changed, start_run(out, {"settings": {"seed": 1}}):
        pass
    with start_run(out, facts) as partial:
        assert (partial / "work").read_text() == "of hours"
        write_manifest(partial, "thing", facts)
        publish(partial)
    assert names(out) == [MANIFEST, "work"]


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in ("", ".", "/", "model/..", file, file / "speed"):
        with pytest.raises(UserError, match="got (no name|the file)"):
            is_finished(out, "shards", {})
        with (
            pytest.raises(UserError, match="got (no name|the file)"),
            atomic_folder(out),
        ):
            pass
    assert file.read_text() == "mine"
    assert not is_finished(tmp_path / "new" / "folder", "shards", {})


@pytest.mark.parametrize("target", ["there", "below/that is not there"])
def test_a_link_stays_and_its_target_becomes_the_result(
    target: str, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "out"
    link.symlink_to(tmp_path / target)
    assert not is_finished(link, "thing", {})
    with atomic_folder(link) as partial:
        assert not (link / "weights").exists()
        (partial / "weights").write_text("large")
        write_manifest(partial, "thing", {})
    assert link.is_symlink() and is_finished(link, "thing", {})
    assert names(tmp_path / target) == [MANIFEST, "weights"]
    assert not list(tmp_path.glob("**/.*"))
