"""Data preparation as a whole, on real files, by every executor."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from rich.console import Console

from conf import UserError, settings
from conf.stage import lock, read_manifest
from data_prep.budget import read_table
from data_prep.config import DataConfig, DataPrepConfig, ProportionConfig
from data_prep.encode import Encoder, Mode
from data_prep.job import Job, sweep
from data_prep.pipeline import prepare
from data_prep.shards import Shards
from data_prep.tables import print_summary
from data_prep.vocab import Vocab, load_tokenizer
from tests.conftest import data_settings
from tests.data_prep.conftest import arguments, content, run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_no_byte(
    jsonl: Path, data_folder: Path, expected: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    run(arguments(jsonl, data_folder / "tokenizer", tmp_path / "out", f"workers={workers}"))
    assert content(tmp_path / "out") == expected


def test_what_was_killed_goes_on_to_the_same_bytes(
    jsonl: Path, data_folder: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "data_prep"]
    command += arguments(jsonl, data_folder / "tokenizer", tmp_path / "out", "workers=2")
    killed = 0
    for seconds in (0.9, 1.2, 1.5, 1.8):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(seconds)
        killed += process.poll() is None
        # The command alone: its workers must notice.
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert content(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_killed_tasks_have_left_is_swept_but_not_what_lives(tmp_path: Path) -> None:
    """Every kill left its workers' tasks as far as they had come, and the next run let them lie."""
    job = Job(data_settings(tmp_path / "out"), tmp_path)
    left, living, done = (job.work / "encode" / name for name in (".00000.aa", ".00001.bb", "00002"))
    for folder in (left, living, done):
        folder.mkdir(parents=True)
        (folder / "train.tokens").write_text("half")
    held = lock(living, living)
    sweep(job)
    os.close(held)
    assert sorted(path.name for path in done.parent.iterdir()) == [".00001.bb", "00002"]


def test_a_second_run_has_nothing_to_do_unless_the_input_changed(
    jsonl: Path, data_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"content": "x = 1\\n"}\n')
    wanted = arguments(tmp_path / "in", data_folder / "tokenizer", tmp_path / "out", "workers=1")
    config = settings("data_prep", DataPrepConfig, wanted)
    assert prepare(config) is None
    assert "nothing to do" in str(prepare(config))
    (tmp_path / "in" / "a.jsonl").write_text('{"content": "x = 1\\n"}\n' * 2)
    with pytest.raises(UserError, match=r"inputs\.data\.path"):
        prepare(config)


@pytest.mark.parametrize("limit", [2**34, 0])
def test_files_rewritten_in_the_same_size_are_other_data(
    jsonl: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Names and sizes alone were compared: other texts of the same lengths were "finished: nothing to do"."""
    monkeypatch.setattr("data_prep.pipeline.CONTENT_BYTES", limit, raising=False)
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"content": "x = 1\\n"}\n')
    wanted = arguments(tmp_path / "in", data_folder / "tokenizer", tmp_path / "out", "workers=1")
    config = settings("data_prep", DataPrepConfig, wanted)
    prepare(config)
    path.write_text('{"content": "y = 2\\n"}\n')
    with pytest.raises(UserError, match=r"inputs\.data\.path"):
        prepare(config)


def test_a_copy_of_the_data_is_the_same_data(jsonl: Path, data_folder: Path, tmp_path: Path) -> None:
    """A clone or a copy has other times."""
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"content": "x = 1\\n"}\n')
    wanted = arguments(tmp_path / "in", data_folder / "tokenizer", tmp_path / "out", "workers=1")
    config = settings("data_prep", DataPrepConfig, wanted)
    prepare(config)
    os.utime(path, (1, 1))
    assert "nothing to do" in str(prepare(config))


def test_what_is_dropped_is_counted_and_written_aside(expected: dict[str, bytes]) -> None:
    manifest = json.loads(expected["manifest"])
    assert manifest["drops"] == {"empty": 1, "malformed row": 3, "missing column": 2}
    rows = [json.loads(line) for line in expected["drops.jsonl"].splitlines()]
    assert len(rows) == 6 and {row["file"] for row in rows} == {f"lang{i % 3}/{i}.jsonl" for i in range(6)}
    assert manifest["counts"]["rows"] == manifest["counts"]["documents"] + 6


def test_too_much_that_is_unreadable_is_refused(jsonl: Path, data_folder: Path, tmp_path: Path) -> None:
    wanted = arguments(jsonl, data_folder / "tokenizer", tmp_path / "out", "workers=2", "max_unreadable=0.01")
    with pytest.raises(UserError, match=r"at most 1\.0% of rows unreadable \(max_unreadable\), got 5 of"):
        run(wanted)
    assert not (tmp_path / "out").exists()


def test_nothing_left_is_refused(data_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"content": " "}\n')
    wanted = arguments(tmp_path / "in", data_folder / "tokenizer", tmp_path / "out", "workers=1")
    with pytest.raises(UserError, match="must have documents to train on, got 1 empty"):
        run(wanted)


def test_a_budget_takes_its_part_of_every_language(
    jsonl: Path, data_folder: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    whole = json.loads(expected["manifest"])
    tokens = whole["train"]["tokens"] + whole["held_out"]["tokens"]
    wanted = arguments(jsonl, data_folder / "tokenizer", tmp_path / "out", "workers=1", f"budget={tokens // 2}")
    (tmp_path / "table.csv").write_text("language,characters\nlang0,3\nlang1,1\n")
    run([*wanted, f"proportion.table={tmp_path / 'table.csv'}"])
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["train"]["tokens"] + manifest["held_out"]["tokens"] == pytest.approx(tokens / 2, rel=0.2)
    assert manifest["languages"] == ["lang0", "lang1"]
    assert manifest["drops"]["unknown language"] > 0 and manifest["counts"]["not chosen"] > 0
    assert manifest["chosen"]["lang0"]["share"] == 0.75


def test_a_language_with_0_in_the_table_is_left_out(
    jsonl: Path, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was taken whole, and then the summary was a KeyError."""
    table = tmp_path / "table.csv"
    wanted = arguments(jsonl, data_folder / "tokenizer", tmp_path / "out", "workers=1", "budget=10K")
    table.write_text("language,bytes\nlang0,3\nlang1,1\nlang2,0\n")
    run([*wanted, f"proportion.table={table}"])
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["languages"] == ["lang0", "lang1"] and manifest["chosen"]["lang2"]["threshold"] == 0
    print_summary(manifest, Console())
    assert "lang2" not in capsys.readouterr().out
    table.write_text("language,bytes\nlang0,3\nlang1,-1\n")
    with pytest.raises(UserError, match=r"'bytes' or 'characters', got bytes=-1 of lang1"):
        run([*wanted, f"proportion.table={table}"])


def test_what_was_begun_with_other_settings_is_kept(
    jsonl: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of an unfinished preparation were deleted, without a word, for another seed or a commit since."""
    wanted = arguments(jsonl, data_folder / "tokenizer", tmp_path / "out", "workers=1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data_prep.pipeline.finish", Mock(side_effect=KeyboardInterrupt))
        run(wanted)
    done = sorted((tmp_path / ".out.partial").rglob("facts.json"))
    with pytest.raises(UserError, match=r"with seed=0; requested seed=1. Use another out"):
        run([*wanted, "seed=1"])
    with monkeypatch.context() as patch, pytest.raises(UserError, match="requested commit=another"):
        patch.setattr("data_prep.pipeline.commit", lambda: "another")
        run(wanted)
    assert done and sorted((tmp_path / ".out.partial").rglob("facts.json")) == done
    run(wanted)


def test_a_budget_counts_the_pieces_of_split_documents(jsonl: Path, data_folder: Path, tmp_path: Path) -> None:
    """Whole documents were measured, whose pieces take a quarter more tokens."""
    more = ["workers=1", "budget=80K", "data.split_chars=60", "held_out=0"]
    run(arguments(jsonl, data_folder / "tokenizer", tmp_path / "out", *more))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["train"]["tokens"] == pytest.approx(80_000, rel=0.08)


def test_a_document_larger_than_a_shard(data_folder: Path, tmp_path: Path) -> None:
    """The shards beside its own are empty, and an empty file cannot be mapped."""
    (tmp_path / "in").mkdir()
    text = "".join(f"x{i} = {i}\n" for i in range(4000))
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps({"content": text}))
    more = ["workers=1", "shard_tokens=1000", "held_out=0"]
    run(arguments(tmp_path / "in", data_folder / "tokenizer", tmp_path / "out", *more))
    assert texts_of(tmp_path / "out") == {"a.jsonl:0": text}


def test_the_result_cannot_lie_within_the_data(jsonl: Path, data_folder: Path) -> None:
    """It became input of the next run."""
    with pytest.raises(UserError, match=r"must be a folder outside of data\.path"):
        run(arguments(jsonl, data_folder / "tokenizer", jsonl / "out"))


def test_a_changed_table_is_noticed(jsonl: Path, data_folder: Path, tmp_path: Path) -> None:
    """Its path alone counted: after an edit there was nothing to do."""
    table = tmp_path / "table.csv"
    wanted = arguments(jsonl, data_folder / "tokenizer", tmp_path / "out", "workers=1", "budget=9K")
    wanted += ["proportion.unit=bytes", f"proportion.table={table}"]
    table.write_text("language,bytes\nlang0,1\nlang1,1\n")
    run(wanted)
    table.write_text("language,bytes\nlang0,1\nlang1,2\n")
    with pytest.raises(UserError, match=r"inputs\.proportion\.table"):
        run(wanted)
    table.write_text("language,bytes\nlang0\n")
    with pytest.raises(UserError, match="must be a CSV file with languages and a column"):
        run(wanted)


def test_a_table_with_a_long_field(tmp_path: Path) -> None:
    """A field of more than 131,072 characters was a traceback of Python's CSV reader."""
    table = tmp_path / "table.csv"
    table.write_text("language,bytes,about\npython,5," + "x" * 200_000 + "\n")
    data = DataConfig(path=str(tmp_path))
    config = DataPrepConfig(
        out="out", data=data, tokenizer="t", budget="1M", proportion=ProportionConfig(table=str(table))
    )
    assert read_table(config) == {"python": 5.0}


def test_near_duplicates_are_removed_but_one(data_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    texts = [path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))]
    texts = [text for text in texts if len(text) > 2000]
    (tmp_path / "in").mkdir()
    for index in range(2):
        changed = [text.replace("json", f"json{index}", 1) for text in texts]
        rows = [json.dumps({"content": text}) for text in changed]
        (tmp_path / "in" / f"{index}.jsonl").write_text("\n".join(rows))
    more = ["workers=1", "near_duplicates=true"]
    run(arguments(tmp_path / "in", data_folder / "tokenizer", tmp_path / "out", *more))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["drops"] == {"near-duplicate": len(texts)}
    assert manifest["counts"]["documents"] == len(texts)


def texts_of(folder: Path) -> dict[str, str]:
    """Every document's text, decoded from the shards."""
    manifest = json.loads((folder / "manifest.json").read_text())
    vocab = Vocab.from_json(manifest["vocab"])
    encoder = Encoder(load_tokenizer(folder / "tokenizer"), vocab)
    parts: dict[str, list[tuple[int, int, np.ndarray]]] = {}
    for split in {path.name.split("-")[0] for path in folder.glob("*.tokens.npy")}:
        for sequence in Shards(folder, split):
            for id, span in zip(sequence.ids, sequence.spans, strict=True):
                ids = sequence.tokens[span["start"] : span["stop"]]
                parts.setdefault(id, []).append((int(span["offset"]), int(span["mode"]), ids))
    found = {}
    for id, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        ids = np.concatenate([piece[2] for piece in pieces]).tolist()
        found[id] = text_of(ids, Mode(pieces[0][1]), vocab, encoder)
    return found


def text_of(ids: list[int], mode: Mode, vocab: Vocab, encoder: Encoder) -> str:
    ids = [i for i in ids if i not in (vocab.bos, vocab.eos)]
    strip = 1 if encoder.implicit_space else 0  # enc(s) = inf(" " + s)
    if mode is Mode.PLAIN:
        return encoder.decode(ids)[strip:]
    suf, mid, eot = (ids.index(x) for x in (vocab.suf, vocab.mid, vocab.eot))
    first, suffix, last = ids[1:suf], ids[suf + 1 : mid], ids[mid + 1 : eot]
    parts = [encoder.decode(part) for part in (first, last, suffix)]
    led = 0 if mode is Mode.PSM else 1  # which part was encoded with the leading space
    parts[led] = parts[led][strip:]
    return "".join(parts)


def test_shards_decode_back_to_the_source_text(data_folder: Path) -> None:
    """Plain documents and both infilling modes, whole and cut, held out or not."""
    found = texts_of(data_folder)
    files: dict[str, dict[int, str]] = {}
    for id, text in found.items():
        file, _, piece = id.rpartition("#")
        files.setdefault(file, {})[int(piece)] = text
    root = Path(sysconfig.get_path("stdlib"))
    sources = [p for name in ("json", "email", "logging") for p in (root / name).glob("*.py")]
    kept = [path for path in sources if path.read_text().strip()]
    assert len(files) == len(kept) > 20
    for path in kept:
        pieces = files[path.relative_to(root).as_posix()]
        assert "".join(pieces[index] for index in sorted(pieces)) == path.read_text()


def test_held_out_files_are_never_trained_on(data_folder: Path) -> None:
    rows = [json.loads(line) for line in (data_folder / "held_out.jsonl").read_text().splitlines()]
    trained = {id.rpartition("#")[0] for q in Shards(data_folder, "train") for id in q.ids}
    held = {id for q in Shards(data_folder, "held_out") for id in q.ids}
    assert rows and {row["id"] for row in rows} == held
    assert not trained & {id.rpartition("#")[0] for id in held}


def test_modes_padding_and_starts_are_recorded(data_folder: Path) -> None:
    manifest = json.loads((data_folder / "manifest.json").read_text())
    modes = manifest["train"]["modes"]
    assert min(modes["PSM"], modes["SPM"]) > 0.15 * manifest["train"]["documents"]
    assert manifest["train"]["filled"] > 0.98
    for sequence in Shards(data_folder, "train"):
        assert not sequence.tokens.flags.owndata and not sequence.spans.flags.owndata  # read in place
        assert (sequence.documents >= 0).sum() == sequence.used
        for span in sequence.spans[sequence.spans["offset"] == 0]:
            assert sequence.tokens[span["start"]] == manifest["vocab"]["bos"]


def test_a_document_too_long_for_infilling_stays_plain(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for index in range(12):
        (tmp_path / "in" / f"{index}.py").write_text(f"x{index} = 1\n" * 200)
    overrides = [f"data.path={tmp_path / 'in'}", "data.include=['*.py']", "data.split_chars=null"]
    prepare(data_settings(tmp_path / "out", *overrides))
    manifest: dict[str, Any] = read_manifest(tmp_path / "out", "shards", "out")
    for name in ("train", "held_out"):
        assert manifest[name]["modes"] == {"PLAIN": manifest[name]["documents"]}


def test_a_wrong_out_is_told_before_the_input_is_listed(tmp_path: Path) -> None:
    """A large input was listed, or the hub asked, before a folder that could not be written was told."""
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UserError, match=r"^out=.* must be a new or empty folder, got other files there"):
        prepare(data_settings(tmp_path, "data.path=no/dataset/here"))
    with pytest.raises(UserError, match=r"^out=.* must be a new or empty folder, got the file"):
        prepare(data_settings(tmp_path / "mine", "data.path=no/dataset/here"))
