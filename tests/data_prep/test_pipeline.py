"""The whole data preparation, on real files, by every executor."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conf.errors import UserError
from conf.runs.files import read_json
from conf.runs.stage import ROOT, partial_of, read_manifest
from conf.settings.cli import run as run_command
from conf.text.rows import read_rows
from data_prep.__main__ import main
from data_prep.config import DataPrepConfig, NgramsConfig
from data_prep.document import Document, held_out_number, held_out_share
from data_prep.inspect import warnings
from data_prep.ngram_tasks import check_size
from data_prep.shards import SPLITS, Shards
from data_prep.sources import METADATA
from tests import bpe
from tests.conftest import data_arguments, text_vocab
from tests.data_prep.conftest import Args, arguments, content, run, texts_of
from tests.full_disk import largest_file

STUB_COMMANDS = {
    # Runs all tasks of the array at once, since the previous jobs have ended.
    "sbatch": """#!/bin/bash
script="${@: -1}"; n=$(cat "$STUB/jobs" 2>/dev/null || echo 100)
echo $((n + 1)) > "$STUB/jobs"; cp "$script" "$STUB/$n.sh"; echo "$@" > "$STUB/$n.args"
last=$(grep -oP '#SBATCH --array=0-\\K[0-9]+' "$script" || echo 0)
for task in $(seq 0 $last); do
    SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=node1 SLURM_JOB_ID=$n bash "$script" \
        > "$STUB/$n.$task.out" 2>&1
done
echo "Submitted batch job $n"
""",
    "srun": """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done; exec "$@"
""",
    "scontrol": "#!/bin/bash\necho node1\n",
    "squeue": "#!/bin/bash\necho 100 cpu data_prep-finish\n",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return settings for a cluster with stubs of Slurm's commands."""
    for name, text in STUB_COMMANDS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB", str(tmp_path))
    return ["executor=slurm", "workers=2", "slurm.partition=cpu"]


FEW = ["data.include=['lang0/*']", "ngrams.megabytes=0"]  # a phase may take seconds


@pytest.fixture
def few(args: Args, tmp_path: Path) -> dict[str, bytes]:
    """Return the files that one worker makes from a part of the data."""
    run(args(*FEW))
    return content((tmp_path / "out").rename(tmp_path / "local"))


@pytest.fixture(scope="session")
def expected(
    jsonl: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """Return the files that one worker makes without an interruption."""
    tmp_path = tmp_path_factory.mktemp("expected")
    run(arguments(jsonl, data_folder, tmp_path))
    assert len(read_manifest(tmp_path / "out", "shards", "out")["train"]["shards"]) > 2
    return content(tmp_path / "out")


def test_slurm_changes_no_byte(
    args: Args, few: dict[str, bytes], tmp_path: Path, slurm: list[str]
) -> None:
    """A stub runs the cluster's scripts on this machine."""
    (tmp_path / "out.logs").mkdir()
    (tmp_path / "out.logs" / "slurm_job").write_text("100")
    with pytest.raises(UserError, match="being written by Slurm job 100"):
        run(args(*FEW, *slurm))
    (tmp_path / "out.logs" / "slurm_job").unlink()
    run(args(*FEW, *slurm))
    assert content(tmp_path / "out") == few
    options = "".join(path.read_text() for path in tmp_path.glob("*.sh"))
    assert "--array=0-1\n" in options and "--partition=cpu" in options
    submitted = "".join(path.read_text() for path in tmp_path.glob("*.args"))
    assert "--dependency=afterok:" in submitted


def test_a_killed_run_goes_on_to_the_same_bytes(
    args: Args, expected: dict[str, bytes], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "data_prep", *args("workers=2")]
    work = partial_of(tmp_path / "out") / "work"
    killed = 0
    for phase in ("encode", "pack", "count"):
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        while process.poll() is None and not (work / phase).exists():
            time.sleep(0.01)
        killed += process.poll() is None
        # Kill only the command; its workers must end by themselves.
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed
    subprocess.run(command, cwd=ROOT, check=True)
    assert content(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_run_that_was_killed_while_it_finished_goes_on(
    args: Args,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An n-gram table that had been moved already was searched for at its old path."""

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data_prep.phases.write_manifest", killed)
        run(args())
    run(args())
    assert content(tmp_path / "out") == expected


@pytest.mark.parametrize("size", [1000, 200_000])
def test_a_run_goes_on_after_a_full_disk(
    size: int, tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["data_prep", *data_arguments(out)])
    with largest_file(size), pytest.raises(SystemExit, match="2"):
        run_command("data_prep", DataPrepConfig, main)
    assert not out.exists()
    run_command("data_prep", DataPrepConfig, main)
    assert not partial_of(out).exists()
    for path in data_folder.glob("*.npy"):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_a_finished_folder_is_that_of_the_same_files(
    args: Args, tmp_path: Path
) -> None:
    """Only names and sizes were compared, so other texts of the same lengths were accepted."""
    config = args(texts=["x = 1\n"])
    run(config)
    os.utime(tmp_path / "in" / "a.jsonl", (1, 1))  # as in a copy
    run(config)
    with pytest.raises(UserError, match=r"inputs\.data\.path"):
        run(args(texts=["y = 2\n"]))


def test_drops_are_counted_and_written_to_a_file(expected: dict[str, bytes]) -> None:
    manifest = json.loads(expected["manifest.json"])
    assert manifest["drops"] == {"empty": 1, "malformed row": 3, "missing column": 2}
    rows = [json.loads(line) for line in expected["drops.jsonl"].splitlines()]
    files = {f"lang{i % 3}/{i}.jsonl" for i in range(6)}
    assert len(rows) == 6 and {row["file"] for row in rows} == files
    assert manifest["counts"]["rows"] == manifest["counts"]["documents"] + 6


def test_a_budget_counts_the_pieces_of_split_documents(
    args: Args, tmp_path: Path
) -> None:
    """Whole documents were measured, but their pieces take a quarter more tokens."""
    run(args("budget=80K", "data.split_chars=60", "held_out=0"))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["train"]["tokens"] == pytest.approx(80_000, rel=0.08)


def test_all_near_duplicates_but_one_are_removed(args: Args, tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    paths = sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))
    texts = [text for path in paths if len(text := path.read_text()) > 2000]
    for index in range(2):
        copies = [text.replace("json", f"json{index}", 1) for text in texts]
        command = args("near_duplicates=true", texts=copies)
        (tmp_path / "in" / "a.jsonl").rename(tmp_path / "in" / f"{index}.jsonl")
    run(command)
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["drops"] == {"near-duplicate": len(texts)}
    assert manifest["counts"]["documents"] == len(texts)


def test_questions_with_other_numbers_are_no_near_duplicates(
    args: Args, tmp_path: Path
) -> None:
    """Bug: all numbers were equal, so 199 of 200 questions of arithmetic were removed."""
    pytest.importorskip("datatrove")
    texts = [f"What is {n} plus {n * 7}?\nIt is {n * 8}." for n in range(20, 40)]
    run(args("near_duplicates=true", texts=texts))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["drops"] == {}


def test_a_table_too_small_for_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Bug: it ended in a traceback after all text had been encoded and packed."""
    sentence = (
        "ngrams.megabytes must be at least 2 for 256,000 ids, got 1. Raise it, or set "
        "ngrams.megabytes=0 for no table."
    )
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_size(NgramsConfig(megabytes=1), text_vocab(256_000))


def test_more_languages_than_a_shard_can_number_are_refused(
    args: Args, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: more than 65,536 languages ended in a traceback."""
    monkeypatch.setattr("data_prep.phases.MOST_LANGUAGES", 2)
    message = "data.language=content must give at most 2 languages, got 3. Name a"
    with pytest.raises(UserError, match=message):
        run(args("data.language=content", texts=["x = 1\n", "y = 2\n", "z = 3\n"]))


@pytest.mark.parametrize(
    ("content", "overrides", "cure"),
    [
        (b"", [], r"drops: \w+\. The files are empty: give other files. See"),
        (
            gzip.compress(b'{"content": "--------"}\n' * 3)[:-4],
            [],
            "marker was reached. Download the file again, or set max_unreadable=1",
        ),
        (b'{"content": "\xff"}\n', [], r"0 .*\. Convert the files to UTF-8\. See"),
        (
            b'{"content": "--------"}\n',
            [],
            r"row 0\. Lower filters\.alphanumeric\. See",
        ),
        (
            b'{"content": "x = 1", "l": "py"}\n',
            ["data.language=l", "budget=1K", "proportion.table=TABLE"],
            r"row 0: py\. Spell the languages of proportion\.table as in the data, or",
        ),
    ],
    ids=["no rows", "truncated", "not UTF-8", "few alphanumerics", "unknown language"],
)
def test_the_message_of_unusable_data_has_a_cure(
    args: Args,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    overrides: list[str],
    cure: str,
) -> None:
    """Bug: it had two spaces in place of the cure.

    Of a truncated archive it named the filter that drops most rows, not the damage. The corrected
    command was refused for the unfinished run.
    """
    monkeypatch.chdir(tmp_path)
    Path("TABLE").write_text("language,bytes\nPY,10\n")
    name = "a.jsonl.gz" if content.startswith(b"\x1f") else "a.jsonl"
    Path(name).write_bytes(content)
    given = args(f"data.path={name}", "max_unreadable=0.9", *overrides)
    with pytest.raises(UserError, match=cure) as error:
        run(given)
    sentence = str(error.value)
    assert "  " not in sentence
    folder = sentence.rpartition("use another out= or delete ")[2]
    assert Path(folder) == partial_of(tmp_path / "out")


def test_sequences_that_no_memory_holds_are_refused() -> None:
    """Bug: seq_len=99999999999999 ended in a traceback of NumPy."""
    with pytest.raises(ValueError, match="seq_len must be 16 to 1048576, got 9"):
        DataPrepConfig(tokenizer="DIR", out="OUT", seq_len=99_999_999_999_999)


def test_a_document_larger_than_a_shard_stays_plain(args: Args, tmp_path: Path) -> None:
    """All other shards are empty, and an empty file cannot be memory-mapped."""
    texts = [f"x{i} = 1\n" * 2000 for i in range(8)]
    run(args("shard_tokens=1000", "held_out=0", texts=texts))
    expected = {f"a.jsonl:{index}": text for index, text in enumerate(texts)}
    assert texts_of(tmp_path / "out") == expected
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["train"]["modes"] == {"PLAIN": 8}


def test_no_copy_of_a_held_out_text_is_trained_on(args: Args, tmp_path: Path) -> None:
    """Bug: equal texts with other ids were trained on and held out: held_out was no test."""
    texts = [f"def f{index}():\n    return {index}\n" * 9 for index in range(20)] * 3
    run(args("data.id=[]", "fim_rate=0", texts=texts))
    sides = {
        split: {texts[int(id.split(":")[1])] for s in shards for id in s.ids}
        for split in SPLITS
        for shards in [Shards(tmp_path / "out", split)]
    }
    assert sides["held_out"] and sides["train"].isdisjoint(sides["held_out"])


def test_conversations_with_one_opening_are_on_one_side() -> None:
    """Several answers to a prompt have rows of their own in the answers of infer.regenerate."""

    def number(id: str, *contents: str) -> float:
        roles = "system", "user", "assistant"
        messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents))
        document = Document(id, "\n\n".join(contents), "none", messages=messages)
        return held_out_number(document, seed=0)

    first = number("a", "be brief", "hi", "hello")
    assert first == number("b", "be brief", "hi", "good day")
    assert first != number("a", "be brief", "bye", "hello")


def test_a_small_repository_holds_out_few_of_its_different_files() -> None:
    """Copies of one file count once: four of 40 different files, each three times."""
    numbers = [held_out_number(document, seed=0) for document in documents(40)] * 3
    share = held_out_share(numbers, share=0.01, least=4)
    assert sum(number < share for number in numbers) == 3 * 4
    assert held_out_share(numbers, share=0, least=4) == 0


def documents(count: int) -> list[Document]:
    return [Document(f"{i}.py", f"x = {i}\n", "py") for i in range(count)]


def test_a_repository_is_prepared_by_default_settings(
    data_folder: Path, tmp_path: Path
) -> None:
    """Generated files are left out, and three files are held out."""
    root = tmp_path / "repository"
    files = sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))[:17]
    texts = {f"src/{path.name}": path.read_text() for path in files}
    others = (".git/config", ".venv/a.py", "node_modules/i.js", "a.min.js")
    texts |= dict.fromkeys(others, "def never_read():\n    return 1\n" * 9)
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    options = [bpe.ADAPTIVE, "seq_len=512", "workers=1", "data.split_chars=700"]
    tokenizer = f"tokenizer={data_folder / 'tokenizer'}"
    run([f"data.path={root}", tokenizer, f"out={tmp_path / 'out'}", *options])
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["counts"]["rows"] == 17 and manifest["languages"] == ["py"]
    rows = read_rows(tmp_path / "out" / "held_out.jsonl")
    assert len({row["id"].split("#")[0] for row in rows}) == 3
    assert list(warnings(manifest)) == []
    manifest["held_out"]["sequences"] = 0
    (sentence,) = warnings(manifest)
    assert sentence.startswith("held_out should have at least")


@pytest.mark.parametrize(
    ("overrides", "texts", "message"),
    [
        (["max_unreadable=0.01"], None, r"at most 1\.0% of rows and of files .*, got"),
        ([], [" "], "must have documents, .* got .* drops: 1 empty"),
        (
            ["vocab.adaptive=[999999]"],
            ["x"],
            "vocab.adaptive must be .*or the next ids",
        ),
        (  # the message had "and data.split=None"
            ["data.include=['*.c']"],
            ["x"],
            r"must have jsonl files that match data\.include=\[\*\.c\] but not",
        ),
        (["decontaminate.mbpp=BAD"], ["x"], "must be a file of rows, got"),
        (  # the message had neither the budget nor a cure
            ["budget=1"],
            ["x = 1\n" * 50],
            "budget must be large enough .*, got 1, .* of 1 document. Raise budget",
        ),
        (["budget=1K", "proportion.table=BAD"], ["x"], "BAD must be a CSV file"),
        (["out=in/out", "data.path=in"], ["x"], r"folder outside of data\.path"),
        (["executor=slurm"], ["x"], "slurm.partition must be given"),
    ],
)
def test_refusals_leave_nothing(
    args: Args,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    texts: Any,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("BAD").write_text('{"x": 1\n')
    given = args(*overrides, texts=texts)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        run(given)
    if not partial_of(
        tmp_path / "out"
    ).exists():  # after the plan, the unfinished folder is kept
        assert sorted(tmp_path.rglob("*")) == before


def test_the_starcoder_sample_decodes_back_to_the_source_byte_for_byte(
    shared_data: Path, tmp_path: Path
) -> None:
    """Use CodeLlama's tokenizer, plain documents and both infilling modes.

    The sources are read without this project.
    """
    root = shared_data / "starcoder_sample"
    names = ("max_stars_repo_name", "max_stars_repo_path", "id")
    sources = {}
    for path in root.glob("*/*.parquet"):
        for row in pq.read_table(path).to_pylist():
            text = METADATA.sub("", row["content"], count=1)
            if text.strip():
                id = "/".join([path.parent.name, *(row[name] for name in names)])
                sources[id] = text
    options = ["experiment=starcoder", f"data.path={root}", "held_out=0"]
    options += ["ngrams.megabytes=0", f"out={tmp_path / 'out'}"]
    options += [f"tokenizer={shared_data / 'tokenizers' / 'codellama-7b'}"]
    limits = ("filters.longest_line", "filters.mean_line", "filters.alphanumeric")
    options += [f"{name}=null" for name in (*limits, "decontaminate.humaneval")]
    run(options)
    texts = texts_of(tmp_path / "out")
    assert texts == sources and len(texts) > 4000
    train = read_manifest(tmp_path / "out", "shards", "out")["train"]
    assert train["filled"] >= 0.99 and train["modes"].keys() == {"PLAIN", "PSM", "SPM"}


def test_splits_modes_padding_and_starts(data_folder: Path) -> None:
    """Held-out files are never trained on."""
    manifest = read_json(data_folder / "manifest.json")
    modes = manifest["train"]["modes"]
    assert min(modes["PSM"], modes["SPM"]) > 0.15 * manifest["train"]["documents"]
    assert manifest["train"]["filled"] > 0.98
    files = {}
    for split in ("train", "held_out"):
        shards = Shards(data_folder, split)
        files[split] = {id.rpartition("#")[0] for q in shards for id in q.ids}
        for sequence in shards:
            assert not sequence.tokens.flags.owndata  # memory-mapped
            assert (sequence.documents >= 0).sum() == sequence.used
            for span in sequence.spans[sequence.spans["offset"] == 0]:
                assert sequence.tokens[span["start"]] == manifest["vocab"]["bos"]
    assert files["held_out"] and files["train"].isdisjoint(files["held_out"])


def test_a_budget_takes_its_part_of_every_language(
    args: Args, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """All data of a language with size 0 were chosen. A changed table is detected.

    Bug: a language of the table without data was not reported, nor data that the table does not list.
    """
    whole = json.loads(expected["manifest.json"])
    tokens = whole["train"]["tokens"] + whole["held_out"]["tokens"]
    table = tmp_path / "table.csv"
    command = args(f"budget={tokens // 3}", f"proportion.table={table}")
    table.write_text("language,characters\nlang0,3\nlang1,1\nlang3,0\ngo,4")
    run(command)
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    chosen = manifest["train"]["tokens"] + manifest["held_out"]["tokens"]
    assert chosen == pytest.approx(tokens / 3, rel=0.2)
    assert manifest["languages"] == ["lang0", "lang1"]
    assert manifest["chosen"]["lang0"]["share"] == 0.75
    assert any("the data has no go, which proportion" in w for w in warnings(manifest))
    rows = manifest["counts"]["rows"]
    unlisted = (
        f"of {manifest['drops']['unknown language']} of {rows} rows, such as lang2."
    )
    assert any(unlisted in warning for warning in warnings(manifest))
    table.write_text("language,bytes\nlang0,1\nlang1,2")
    with pytest.raises(UserError, match=r"inputs\.proportion\.table"):
        run(command)
