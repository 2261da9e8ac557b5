"""Data preparation as a whole, on real files, by every executor."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from conf import UserError
from conf import run as run_command
from conf.stage import lock, partial_of, read_manifest
from data_prep.__main__ import main
from data_prep.config import DataConfig, DataPrepConfig, ProportionConfig
from data_prep.inspect import print_summary, warnings
from data_prep.job import Job, sweep
from data_prep.pipeline import prepare
from data_prep.selection import read_table
from data_prep.shards import Shards
from tests.conftest import data_arguments, data_settings
from tests.data_prep.conftest import content, run, texts_of
from tests.full_disk import largest_file
from tests.messages import error

ROOT = Path(__file__).parents[2]
Args = Callable[..., list[str]]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_no_byte(
    args: Args, expected: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    run(args(f"workers={workers}"))
    assert content(tmp_path / "out") == expected


def test_what_was_killed_goes_on_to_the_same_bytes(
    args: Args, expected: dict[str, bytes], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "data_prep", *args("workers=2")]
    killed = 0
    for seconds in (0.9, 1.2, 1.5, 1.8):
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(seconds)
        killed += process.poll() is None
        # The command alone: its workers must notice.
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert content(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_refused_command_leaves_nothing(
    args: Args,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong vocab.bos left a hidden folder, which refused the corrected command."""
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["data_prep", *args(), "vocab.bos=<start>"])
    with pytest.raises(SystemExit):
        run_command("data_prep", DataPrepConfig, main)
    assert "vocab.bos must be a piece of the tokenizer" in error(
        capsys.readouterr().err
    )
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("size", [1000, 200_000])
def test_a_full_disk_is_reported_in_a_sentence_and_gone_on_with(
    size: int,
    tmp_path: Path,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["data_prep", *data_arguments(out)])
    with largest_file(size), pytest.raises(SystemExit) as end:
        run_command("data_prep", DataPrepConfig, main)
    assert end.value.code == 2 and "File too large" in error(capsys.readouterr().err)
    assert not out.exists()
    run_command("data_prep", DataPrepConfig, main)
    assert not partial_of(out).exists()
    for path in data_folder.glob("*.npy"):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_what_killed_tasks_have_left_is_swept_but_not_what_lives(
    tmp_path: Path,
) -> None:
    """Every kill left its workers' tasks as far as they had come, and the next run let them lie."""
    job = Job(data_settings(tmp_path / "out"), tmp_path)
    left, living, done = (
        job.work / "encode" / name for name in (".00000.aa", ".00001.bb", "00002")
    )
    for folder in (left, living, done):
        folder.mkdir(parents=True)
        (folder / "train.tokens").write_text("half")
    held = lock(living, living)
    sweep(job)
    os.close(held)
    assert sorted(path.name for path in done.parent.iterdir()) == [".00001.bb", "00002"]


@pytest.mark.parametrize("limit", [2**34, 0])
def test_a_second_run_has_nothing_to_do_unless_a_file_has_other_content(
    args: Args,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limit: int,
) -> None:
    """Names and sizes alone were compared: other texts of the same lengths were "finished: nothing to do"."""
    monkeypatch.setattr("data_prep.pipeline.CONTENT_BYTES", limit)
    command = args(texts=["x = 1\n"])
    for expected in ("wrote", "nothing to do"):
        monkeypatch.setattr(sys, "argv", ["data_prep", *command])
        run_command("data_prep", DataPrepConfig, main)
        assert expected in capsys.readouterr().out
    if limit:  # a copy has other times
        os.utime(tmp_path / "in" / "a.jsonl", (1, 1))
        run(command)
    args(texts=["y = 2\n"])
    with pytest.raises(UserError, match=r"inputs\.data\.path"):
        run(command)


def test_what_is_dropped_is_counted_and_written_aside(
    expected: dict[str, bytes],
) -> None:
    manifest = json.loads(expected["manifest"])
    assert manifest["drops"] == {"empty": 1, "malformed row": 3, "missing column": 2}
    rows = [json.loads(line) for line in expected["drops.jsonl"].splitlines()]
    assert len(rows) == 6 and {row["file"] for row in rows} == {
        f"lang{i % 3}/{i}.jsonl" for i in range(6)
    }
    assert manifest["counts"]["rows"] == manifest["counts"]["documents"] + 6


def test_too_much_that_is_unreadable_or_nothing_left_is_refused(
    args: Args, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match=r"at most 1\.0% of rows unreadable \(max_unreadable\), got 5 of",
    ):
        run(args("workers=2", "max_unreadable=0.01"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="must have documents to train on, got 1 empty"):
        run(args(f"out={tmp_path}/other", texts=[" "]))


def test_a_budget_takes_its_part_of_every_language(
    args: Args, expected: dict[str, bytes], tmp_path: Path
) -> None:
    whole = json.loads(expected["manifest"])
    tokens = whole["train"]["tokens"] + whole["held_out"]["tokens"]
    (tmp_path / "table.csv").write_text("language,characters\nlang0,3\nlang1,1\n")
    run(args(f"budget={tokens // 2}", f"proportion.table={tmp_path / 'table.csv'}"))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["train"]["tokens"] + manifest["held_out"][
        "tokens"
    ] == pytest.approx(tokens / 2, rel=0.2)
    assert manifest["languages"] == ["lang0", "lang1"]
    assert (
        manifest["drops"]["unknown language"] > 0
        and manifest["counts"]["not chosen"] > 0
    )
    assert manifest["chosen"]["lang0"]["share"] == 0.75


def test_a_language_with_0_in_the_table_is_left_out_and_a_changed_table_is_noticed(
    args: Args, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was taken whole, and then the summary was a KeyError; of the table its path alone counted."""
    table = tmp_path / "table.csv"
    command = args("budget=10K", f"proportion.table={table}")
    table.write_text("language,bytes\nlang0,3\nlang1,1\nlang2,0\n")
    run(command)
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert (
        manifest["languages"] == ["lang0", "lang1"]
        and manifest["chosen"]["lang2"]["threshold"] == 0
    )
    print_summary(manifest, Console())
    assert "lang2" not in capsys.readouterr().out
    for rows, message in {
        "lang0,1\nlang1,2": r"inputs\.proportion\.table",
        "lang0,3\nlang1,-1": r"'bytes' or 'characters', got bytes=-1 of lang1",
        "lang0": "must be a CSV file with languages and a column",
    }.items():
        table.write_text(f"language,bytes\n{rows}\n")
        with pytest.raises(UserError, match=message):
            run(command)


def test_a_table_with_a_long_field(tmp_path: Path) -> None:
    """A field of more than 131,072 characters was a traceback of Python's CSV reader."""
    table = tmp_path / "table.csv"
    table.write_text("language,bytes,about\npython,5," + "x" * 200_000 + "\n")
    shares = ProportionConfig(table=str(table))
    config = DataPrepConfig(
        "out", DataConfig(str(tmp_path)), tokenizer="t", budget="1M", proportion=shares
    )
    assert read_table(config) == {"python": 5.0}


def test_what_was_begun_with_other_settings_is_kept(
    args: Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of an unfinished preparation were deleted, without a word, for another seed or a commit since."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data_prep.pipeline.finish", Mock(side_effect=KeyboardInterrupt))
        run(args())
    done = sorted((tmp_path / ".out.partial").rglob("facts.json"))
    with pytest.raises(
        UserError, match=r"with seed=0; requested seed=1. Use another out"
    ):
        run(args("seed=1"))
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="requested commit=another"),
    ):
        patch.setattr("data_prep.pipeline.commit", lambda: "another")
        run(args())
    assert done and sorted((tmp_path / ".out.partial").rglob("facts.json")) == done
    run(args())


def test_a_budget_counts_the_pieces_of_split_documents(
    args: Args, tmp_path: Path
) -> None:
    """Whole documents were measured, whose pieces take a quarter more tokens."""
    run(args("budget=80K", "data.split_chars=60", "held_out=0"))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["train"]["tokens"] == pytest.approx(80_000, rel=0.08)


def test_a_document_larger_than_a_shard(args: Args, tmp_path: Path) -> None:
    """The shards beside its own are empty, and an empty file cannot be mapped."""
    text = "".join(f"x{i} = {i}\n" for i in range(4000))
    run(args("shard_tokens=1000", "held_out=0", texts=[text]))
    assert texts_of(tmp_path / "out") == {"a.jsonl:0": text}


def test_near_duplicates_are_removed_but_one(args: Args, tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    texts = [
        path.read_text()
        for path in sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))
    ]
    texts = [text for text in texts if len(text) > 2000]
    for index in range(2):
        command = args(
            "near_duplicates=true",
            texts=[text.replace("json", f"json{index}", 1) for text in texts],
        )
        (tmp_path / "in" / "a.jsonl").rename(tmp_path / "in" / f"{index}.jsonl")
    run(command)
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["drops"] == {"near-duplicate": len(texts)}
    assert manifest["counts"]["documents"] == len(texts)


def test_shards_decode_back_to_the_source_text(data_folder: Path) -> None:
    """Plain documents and both infilling modes, whole and cut, held out or not."""
    result = texts_of(data_folder)
    files: dict[str, dict[int, str]] = {}
    for id, text in result.items():
        file, _, piece = id.rpartition("#")
        files.setdefault(file, {})[int(piece)] = text
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        p for name in ("json", "email", "logging") for p in (root / name).glob("*.py")
    ]
    remaining = [path for path in sources if path.read_text().strip()]
    assert len(files) == len(remaining) > 20
    for path in remaining:
        pieces = files[path.relative_to(root).as_posix()]
        assert "".join(pieces[index] for index in sorted(pieces)) == path.read_text()


def test_held_out_files_are_never_trained_on(data_folder: Path) -> None:
    rows = [
        json.loads(line)
        for line in (data_folder / "held_out.jsonl").read_text().splitlines()
    ]
    trained = {
        id.rpartition("#")[0] for q in Shards(data_folder, "train") for id in q.ids
    }
    held = {id for q in Shards(data_folder, "held_out") for id in q.ids}
    assert rows and {row["id"] for row in rows} == held
    assert not trained & {id.rpartition("#")[0] for id in held}


def test_modes_padding_and_starts_are_recorded(data_folder: Path) -> None:
    manifest = json.loads((data_folder / "manifest.json").read_text())
    modes = manifest["train"]["modes"]
    assert min(modes["PSM"], modes["SPM"]) > 0.15 * manifest["train"]["documents"]
    assert manifest["train"]["filled"] > 0.98
    for sequence in Shards(data_folder, "train"):
        assert (
            not sequence.tokens.flags.owndata and not sequence.spans.flags.owndata
        )  # read in place
        assert (sequence.documents >= 0).sum() == sequence.used
        for span in sequence.spans[sequence.spans["offset"] == 0]:
            assert sequence.tokens[span["start"]] == manifest["vocab"]["bos"]


def test_a_document_too_long_for_infilling_stays_plain(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for index in range(12):
        (tmp_path / "in" / f"{index}.py").write_text(f"x{index} = 1\n" * 200)
    overrides = [
        f"data.path={tmp_path / 'in'}",
        "data.include=['*.py']",
        "data.split_chars=null",
    ]
    prepare(data_settings(tmp_path / "out", *overrides))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    for name in ("train", "held_out"):
        assert manifest[name]["modes"] == {"PLAIN": manifest[name]["documents"]}


def test_a_wrong_out_is_reported_before_the_input_is_listed(tmp_path: Path) -> None:
    """A large input was listed, or the hub asked, before a folder that could not be written was refused; a
    result within the data became input of the next run.
    """
    (tmp_path / "mine").write_text("x")
    for out, source, message in (
        (
            tmp_path,
            "no/dataset/here",
            "^out=.* must be a new or empty folder, got other files there",
        ),
        (
            tmp_path / "mine",
            "no/dataset/here",
            "^out=.* must be a new or empty folder, got the file",
        ),
        (
            tmp_path / "in" / "out",
            tmp_path / "in",
            r"must be a folder outside of data\.path",
        ),
    ):
        with pytest.raises(UserError, match=message):
            prepare(data_settings(out, f"data.path={source}"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """17 files of the standard library, and what tools put beside sources."""
    root = tmp_path / "repository"
    files = sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))[:17]
    texts = {f"src/{path.name}": path.read_text() for path in files}
    others = (
        ".git/config",
        ".venv/lib/a.py",
        "node_modules/m/i.js",
        "build/x.py",
        "web/app.min.js",
    )
    texts |= dict.fromkeys(
        [*others, "a/__pycache__/b.py"], "def never_read():\n    return 1\n" * 9
    )
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        (["data.split_chars=700"], []),
        # An empty split was first refused by training.
        (["seq_len=65536", "shard_tokens=65536"], ["train", "held_out"]),
    ],
)
def test_a_repository_is_prepared_without_further_settings(
    repository: Path,
    data_folder: Path,
    tmp_path: Path,
    more: list[str],
    warned: list[str],
) -> None:
    out = tmp_path / "data"
    given = [
        f"data.path={repository}",
        f"tokenizer={data_folder / 'tokenizer'}",
        "vocab=demo",
        "seq_len=512",
    ]
    run([*given, "workers=1", f"out={out}", *more])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["counts"]["rows"] == 17 and list(manifest["languages"]) == ["py"]
    files = {
        json.loads(line)["id"].split("#")[0] for line in (out / "held_out.jsonl").open()
    }
    assert len(files) == 3
    assert [warning.split(" must")[0] for warning in warnings(manifest)] == warned
    assert not warned or "smaller seq_len" in next(warnings(manifest))
