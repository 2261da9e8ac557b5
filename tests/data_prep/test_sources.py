"""Read source files and files of rows; damage drops a row or a file."""

import gzip
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import UserError
from data_prep.config import DataConfig
from data_prep.document import NOT_READ, Document, Drop
from data_prep.inspect import warnings
from data_prep.listing import card_configs, config_globs, list_parts
from data_prep.sources import read
from tests.conftest import write_rows

STARCODER = ["max_stars_repo_name", "max_stars_repo_path", "id"]
BAD_TEXTS = pa.array([b"x = 1", b"\xff", b"z = 3"], pa.binary()).view(pa.string())


def read_all(root: Path, kind: str = "source", **options: Any) -> list[Document | Drop]:
    data = DataConfig(path=str(root), kind=kind, **options)
    parts, place = list_parts(data)
    return [row for part in parts for row in read(part, place, data)]


def seen(root: Path, kind: str = "source", **options: Any) -> list[str]:
    """Return the texts of documents and the reasons of drops."""
    rows = read_all(root, kind, **options)
    return [row.text if isinstance(row, Document) else row.reason for row in rows]


def write(root: Path, *names: str) -> None:
    """Write files that contain their own names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def write_parquet(path: Path, **columns: Any) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    pq.write_table(table, path, compression="none", write_page_checksum=True)
    return path.read_bytes()


def test_source_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"\xff\xfe")
    (tmp_path / "b.py").write_bytes(b"y = 1\r\n")
    (tmp_path / "c.py").write_text("x" * 200)
    (tmp_path / "d").write_text("<filename>kept\n")
    (tmp_path / "e.png").write_bytes(b"\x89PNG\0")
    rows = read_all(tmp_path, max_bytes=100)
    assert rows == [
        Drop("undecodable", "a.py", 0, detail=rows[0].detail),  # type: ignore[union-attr]
        Document("b.py", "y = 1\r\n", "py", "b.py"),
        Drop("too large", "c.py", 0, "c.py"),
        Document("d", "<filename>kept\n", "none", "d"),
        Drop("binary", "e.png", 0, "e.png"),
    ]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Bug: the mark at the start of a source file was a part of the document.

    The text of a row is kept as it is: StarCoder's has marks.
    """
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfx = 1\n")
    assert seen(tmp_path) == ["x = 1\n"]
    write_parquet(tmp_path / "b.parquet", content=["\ufeffx"])
    assert seen(tmp_path / "b.parquet", "parquet") == ["\ufeffx"]


def test_starcoder_parquet(tmp_path: Path) -> None:
    texts = [
        "<reponame>a/b<gh_stars>1\nx = 1\n",
        "y\n<filename>kept\n",
        "<filename>\n<",
    ]
    columns = {name: ["p", "q", "r"] for name in STARCODER}
    write_parquet(tmp_path / "python" / "a.parquet", content=texts, **columns)
    rows = read_all(tmp_path, "parquet", id=STARCODER)
    assert rows[0] == Document(
        "python/p/p/p", "x = 1\n", "python", "python/a.parquet", 0
    )
    assert seen(tmp_path, "parquet") == ["x = 1\n", "y\n<filename>kept\n", "<"]


def test_damaged_parquet_files_are_drops(tmp_path: Path) -> None:
    """A changed text was read, because Arrow does not verify checksums by default."""
    whole = write_parquet(tmp_path / "a.parquet", content=["x = 1\n", None], id=[1, 2])
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.parquet").write_bytes(b"")
    write_parquet(tmp_path / "d.parquet", text=["x"], id=["1"])
    (tmp_path / "e.parquet").write_bytes(whole.replace(b"x = 1\n", b"x = 3\n", 1))
    drops = [row for row in read_all(tmp_path, "parquet") if isinstance(row, Drop)]
    assert [(drop.file, drop.row, drop.reason) for drop in drops] == [
        ("a.parquet", 1, "missing column"),
        ("b.parquet", None, "unreadable file"),
        ("c.parquet", None, "unreadable file"),
        ("d.parquet", None, "missing column"),
        ("e.parquet", None, "unreadable file"),
    ]


# Each line with its text or the reason of its drop. An empty line is not a row.
LINES = {
    b'\xef\xbb\xbf{"content": "x = 1\\n", "language": "python"}': "x = 1\n",
    b'{"content": "x': "malformed row",
    b"": None,
    b'{"content": "\xff"}': "undecodable",
    b"[1]": "malformed row",
    b'{"text": "x"}': "missing column",
    b'{"content": 5, "language": "c"}': "malformed row",
    b'{"content": "\\ud800", "language": "c"}': "undecodable",
    b"[" * 100_000: "malformed row",
    b'{"content": "<gh_stars>1\\ny = 2", "language": "c"}': "y = 2",
}


def test_a_line_of_100_mb_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(b'{"content": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"content": "\xc3\xa9\xc3\xa9"}\n{"content": "ee"}\n')
    result = seen(tmp_path, "jsonl", max_bytes=3)
    assert result == ["line too large", "too large", "ee"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, st.lists, max_leaves=4)
ROWS = st.dictionaries(st.sampled_from(["content", "language", "id"]), VALUES).map(
    lambda row: json.dumps(row).encode()
)


@given(st.lists(st.binary(max_size=30) | ROWS | st.sampled_from([*LINES]), max_size=8))
def test_reading_arbitrary_bytes_never_raises(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.jsonl").write_bytes(b"\n".join(lines))
        for row in read_all(Path(folder), "jsonl", language="language", id=["id"]):
            assert isinstance(row, Drop) or f"{row.text}{row.id}{row.language}".encode()


def test_a_file_that_the_system_cannot_read_is_not_counted_as_damaged(
    tmp_path: Path,
) -> None:
    """Running out of memory or open files counted as damage, and the file's rows were lost."""
    write_parquet(tmp_path / "a.parquet", content=["x = 1\n"])
    data = DataConfig(path=str(tmp_path), kind="parquet")
    parts, place = list_parts(data)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(UserError, match=r"a\.parquet must be readable, got .*Rerun"):
        list(read(parts[0], place, data))


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (MemoryError(), "to continue, with fewer workers"),
        (PermissionError(13, "denied"), "to continue, when the file is readable"),
    ],
)
def test_fewer_workers_are_the_cure_of_a_lack_of_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, cure: str
) -> None:
    """Bug: a file that could not be opened was to be read again with fewer workers."""

    def fail(path: str) -> None:
        raise error

    write(tmp_path, "a.py")
    monkeypatch.setattr("data_prep.sources._open", fail)
    with pytest.raises(UserError, match=f"Rerun the command {cure}$"):
        read_all(tmp_path)


def test_a_bad_value_in_parquet_drops_only_its_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", content=BAD_TEXTS)
    assert seen(tmp_path, "parquet") == ["x = 1", "undecodable", "z = 3"]


def test_json_lines(tmp_path: Path) -> None:
    archive = pa.Codec("zstd").compress(b"\n".join(LINES), asbytes=True)
    (tmp_path / "a.jsonl.zst").write_bytes(archive)
    rows = read_all(tmp_path, "jsonl", language="language")
    expected = list(filter(None, LINES.values()))
    assert seen(tmp_path, "jsonl", language="language") == expected
    assert [row.row for row in rows] == [0, 1, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("messages", [None, "messages"])
def test_a_null_language_or_id_drops_no_text(
    tmp_path: Path, messages: str | None
) -> None:
    """Bug: a row with a good text was a drop, "missing column"."""
    text: dict[str, Any] = {"content": "x"}
    if messages:
        text = {"prompt": "x", "completion": "y"}
    rows = [
        text | {"language": None, "id": None},
        text | {"language": None, "id": "7"},
        text | {"language": "py", "id": None},
        dict.fromkeys(text) | {"language": "py", "id": "8"},
    ]
    write_rows(tmp_path / "a.jsonl", [*rows, text])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    columns: Any = {"language": "language", "id": ["id"], "messages": messages}
    result = read_all(tmp_path, "jsonl", **columns)
    assert [(row.id, type(row)) for row in result] == [
        *(("a.jsonl:0", Document), ("none/7", Document), ("a.jsonl:2", Document)),
        *(("", Drop), ("", Drop)),
        *(("b.parquet:0", Document), ("none/7", Document), ("b.parquet:2", Document)),
        ("", Drop),
    ]


def test_an_archive_is_read_up_to_its_damage(tmp_path: Path) -> None:
    lines = [json.dumps({"content": f"x = {i}"}) for i in range(2000)]
    whole = gzip.compress("\n".join(lines).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.jsonl.xz").write_bytes(b"")
    result = seen(tmp_path, "jsonl")
    assert result[:2] == ["x = 0", "x = 1"]
    assert result[-2:] == ["unreadable file"] * 2


def test_files_are_chosen_by_globs_and_links_followed_once(tmp_path: Path) -> None:
    """A folder that the globs include only under a link's name was lost if its target came first."""
    write(tmp_path, "releases/42/a.py", "b.py", "node_modules/d.py")
    (tmp_path / "current").symlink_to("releases/42")
    (tmp_path / "releases" / "up").symlink_to("..")
    (tmp_path / "dead.py").symlink_to("nowhere")
    exclude = ["*node_modules/*"]
    for include, listed in {
        "current/**/*.py": ["current/a.py"],
        "**/*": ["b.py", "current/a.py"],
    }.items():
        data = DataConfig(path=str(tmp_path), include=[include], exclude=exclude)
        parts, _ = list_parts(data)
        assert [name for part in parts for name in part.files] == listed


def test_a_link_to_itself_is_a_drop(tmp_path: Path) -> None:
    """A link to itself ended the run, and broken links were only logged."""
    write(tmp_path, "a.py")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dead.py").symlink_to("nowhere")
    rows = read_all(tmp_path)
    assert [(row.file, type(row)) for row in rows] == [
        ("dead.py", Drop),
        ("loop", Drop),
        ("a.py", Document),
    ]
    assert {row.reason for row in rows[:2]} == {"broken link or device"}  # type: ignore[union-attr]


def test_folders_linked_twice_are_read_once(tmp_path: Path) -> None:
    """24 levels of two links each have 2^24 names, and all of them were visited."""
    levels = range(24)
    for level in levels:
        write(tmp_path, f"d/d{level}/{level}.py")
    for level in levels[1:]:
        for name in "ab":
            link = tmp_path / "d" / f"d{level - 1}" / name
            link.symlink_to(f"../d{level}")
    names = [row.file.rpartition("/")[2] for row in read_all(tmp_path)]
    assert sorted(names) == sorted(f"{level}.py" for level in levels)


FORMS = {
    "a.jsonl": '{"content": "x"}\n{"content": "y"}\n',
    "a.json": '[{"content": "x"},\n {"content": "y"}]',
    "indented.json": '{\n  "content": "x"\n}\n{\n  "content": "y"\n}\n',
    "a.csv": "content,n\nx,1\ny,2\n",
    "a.tsv": "content\tn\nx\t1\ny\t2\n",
}


@pytest.mark.parametrize("name", [*FORMS, "a.parquet"])
@pytest.mark.parametrize("single", [True, False])
def test_a_file_of_rows_or_its_folder(tmp_path: Path, name: str, single: bool) -> None:
    """A JSON list was read as one malformed row; for a single file the message was "no such folder"."""
    if name == "a.parquet":
        write_parquet(tmp_path / name, content=["x", "y"])
    else:
        (tmp_path / name).write_text(FORMS[name])
    path = tmp_path / name if single else tmp_path
    rows = read_all(path, "jsonl")
    assert [(row.text, row.file, row.row) for row in rows] == [  # type: ignore[union-attr]
        ("x", name, 0),
        ("y", name, 1),
    ]


def test_damage_in_a_list_or_csv_drops_only_unreadable_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(
        b'[{"content": "x"}, 3, {"content": "\xff"}, {"content": "y"}, {"cont'
    )
    (tmp_path / "b.csv").write_bytes(
        b'content,n\nx,1\n"y",2,3\n\xff,4\n' + b"z" * 80_000 + b",5\nlast,6\n"
    )
    expected = ["x", "malformed row", "undecodable", "y", "malformed row"]
    expected += ["rest of a file"]
    expected += ["x", "malformed row", "undecodable", "malformed row", "last"]
    assert seen(tmp_path, "jsonl", max_bytes=9) == expected
    (tmp_path / "b.csv").unlink()
    (tmp_path / "a.json").write_text('[{"content": "' + "x" * 2_000_000 + '"}]')
    assert seen(tmp_path, "jsonl", max_bytes=9) == ["too large"]


def test_a_list_with_a_row_above_the_limit_is_reported(tmp_path: Path) -> None:
    """Bug: the rows after it were not read, and the message was "Unterminated string"."""
    rows = [{"content": "x"}, {"content": "y" * 5_000_000}, {"content": "z"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    first, large, rest = read_all(tmp_path, "jsonl", max_bytes=9)
    assert isinstance(large, Drop) and isinstance(rest, Drop)
    assert "a value of more than 65590 characters" in large.detail
    assert (rest.reason, rest.row, rest.detail) == (NOT_READ, None, "from row 1 on")
    sizes = {"sequences": 9}
    manifest = {"drops": {NOT_READ: 1}, "settings": {"held_out": 0}, "seq_len": 8}
    (warning,) = warnings(manifest | {"train": sizes, "held_out": sizes})
    assert warning.startswith("the rest of 1 file is not read")


def test_a_cell_that_is_too_large_loses_only_its_row(tmp_path: Path) -> None:
    """Bug: the lines of the cell were read as thousands of rows, and the rows after it were lost."""
    cell = "\n".join(f"{n},line" for n in range(20_000))
    text = f'content,n\nx,1\n"{cell}",2\n' + "".join(f"row {n},3\n" for n in range(9))
    (tmp_path / "a.csv").write_text(text)
    expected = ["x", "malformed row", *(f"row {n}" for n in range(9))]
    assert seen(tmp_path, "jsonl", max_bytes=90) == expected


def test_a_wrong_quote_is_reported_with_its_lines(tmp_path: Path) -> None:
    """Bug: rows from one stray quote to the next became one cell of a document, without a message."""
    rows = [f"row {n}\t{n}\n" for n in range(30)]
    rows[10] = '"row 10\t10\n'
    rows[20] = '"row 20"\t20\n'
    (tmp_path / "a.tsv").write_text("content\tn\n" + "".join(rows))
    read = read_all(tmp_path, "jsonl")
    (drop,) = (row for row in read if isinstance(row, Drop))
    assert drop.detail.startswith("lines 12 to 22: ")
    assert len(read) == 1 + 10 + 9
    (tmp_path / "a.tsv").write_text('content\tn\nx\t1\n"cut in its last cell')
    assert seen(tmp_path, "jsonl") == ["x", "malformed row"]


def test_a_path_with_brackets_is_not_a_pattern(tmp_path: Path) -> None:
    """Bug: the rows of part1.parquet were read as the rows of part[1].parquet."""
    for name in ("part1", "part[1]", "code [v2]/a"):
        write_parquet(tmp_path / f"{name}.parquet", content=[name])
    names = ["code [v2]/a", "part1", "part[1]"]
    assert sorted(seen(tmp_path, "jsonl")) == names


@pytest.mark.parametrize("name", ["a::b.parquet", "x::y/a.parquet"])
def test_a_parquet_file_that_datasets_reads_as_two_addresses_is_refused(
    tmp_path: Path, name: str
) -> None:
    """Bug: it was "Unable to find" in the middle of a run, and the cure was to rerun the command."""
    write_parquet(tmp_path / name, content=["x"])
    with pytest.raises(UserError, match=f"not contain ::, got .*{name}. Rename"):
        read_all(tmp_path, "jsonl")


def test_calls_in_parquet_get_no_keys_of_other_rows(tmp_path: Path) -> None:
    """Bug: arguments had null for each key of other rows' calls, and the model was trained on them."""
    arguments = [{"city": "Oslo"}, {"a": 1}]
    rows = [
        [
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": given}}],
            },
        ]
        for given in arguments
    ]
    pq.write_table(pa.table({"messages": rows}), tmp_path / "a.parquet")
    documents = read_all(tmp_path, "parquet", messages="messages")
    calls = [row.messages[1]["tool_calls"][0] for row in documents]  # type: ignore[union-attr]
    assert [call["function"]["arguments"] for call in calls] == arguments


def test_a_file_and_a_link_to_it_are_read_once(tmp_path: Path) -> None:
    write(tmp_path, "2024.py")
    (tmp_path / "latest.py").symlink_to("2024.py")
    assert seen(tmp_path) == ["2024.py"]


def test_a_test_split_is_read_only_if_it_is_named(tmp_path: Path) -> None:
    names = ["train-0.jsonl", "test-0.jsonl", "data/validation.jsonl", "latest.jsonl"]
    (tmp_path / "data").mkdir()
    for name in names:
        write_rows(tmp_path / name, [{"content": name}])
    assert seen(tmp_path, "jsonl") == [names[2], names[3], names[0]]
    assert seen(tmp_path, "jsonl", split="test") == ["test-0.jsonl"]
    assert seen(tmp_path, "jsonl", split="train") == ["train-0.jsonl"]
    assert seen(tmp_path / "test-0.jsonl", "jsonl") == ["test-0.jsonl"]
    for word in ("test", "testing", "tests"):  # as in `datasets`
        path = tmp_path / "words" / word / "a.jsonl"
        path.parent.mkdir(parents=True)
        write_rows(path, [{"content": word}])
    write_rows(tmp_path / "words" / "b.jsonl", [{"content": "x"}])
    assert seen(tmp_path / "words", "jsonl") == ["x"]
    write(tmp_path / "code", "tests/test_a.py")  # source code has no splits
    assert seen(tmp_path / "code") == ["tests/test_a.py"]


def test_a_path_that_does_not_exist_is_refused_as_a_path(tmp_path: Path) -> None:
    """Bug: "the hub did not answer (HFValidationError). Check the path, or the network"."""
    message = (
        "there is no such path, and a dataset on the hub is named owner/name. Check"
    )
    with pytest.raises(UserError, match=message):
        seen(tmp_path / "none", "jsonl")


def test_settings_that_the_input_does_not_have_are_refused(tmp_path: Path) -> None:
    """Bug: they were ignored, so that data.config=python read all configurations of a clone."""
    write_rows(tmp_path / "train-0.jsonl", [{"content": "x"}])
    with pytest.raises(UserError, match=r"got python .*Use data.include=\[python/"):
        seen(tmp_path, "jsonl", config="python")
    with pytest.raises(UserError, match="and data.split=valid but not .*got no files"):
        seen(tmp_path / "train-0.jsonl", "jsonl", split="valid")
    (tmp_path / "train-0.jsonl").rename(tmp_path / "a.jsonl")
    assert seen(tmp_path / "a.jsonl", "jsonl", split="train") == ["x"]
    for name in ("split", "messages", "language", "text"):
        with pytest.raises(ValueError, match=f"data.{name} needs rows, got train with"):
            seen(tmp_path, "source", **{name: "train"})
    with pytest.raises(
        ValueError, match="data.id needs rows, got .'a'. with data.kind"
    ):
        seen(tmp_path, "source", id=["a"])


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("a.jsonl", "source", "got files of rows .*Add data=chat for conversations"),
        (
            "a.docx",
            "jsonl",
            r"must have the suffix \.jsonl.*got \.docx\. Convert the file",
        ),
    ],
)
def test_a_file_of_another_format_is_reported_with_the_cure(
    tmp_path: Path, name: str, kind: str, message: str
) -> None:
    write(tmp_path, name)
    with pytest.raises(UserError, match=message):
        read_all(tmp_path / name, kind)


def test_a_folder_of_other_formats_is_reported_with_the_cure(tmp_path: Path) -> None:
    write(tmp_path, "a.docx", "b.docx", "c.txt")
    with pytest.raises(UserError, match=r"got 2 \.docx, 1 \.txt\. .* to \.jsonl"):
        read_all(tmp_path, "jsonl")


def test_files_of_other_formats_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: they were left out without a word, and so were B.JSONL and c.jsonl.GZ."""
    rows = b'{"content": "x"}\n'
    (tmp_path / "a.jsonl").write_bytes(rows)
    (tmp_path / "B.JSONL").write_bytes(rows)
    (tmp_path / "c.jsonl.GZ").write_bytes(gzip.compress(rows))
    write(tmp_path, "README.md", "LICENSE", ".cache/a.lock", "_SUCCESS", "load.py")
    assert seen(tmp_path, "jsonl") == ["x"] * 3 and not caplog.messages
    write(tmp_path, "d.zip", "e.zip", "f.lz4")
    assert seen(tmp_path, "jsonl") == ["x"] * 3
    (message,) = caplog.messages
    assert message.startswith(
        "data.path: left out 3 files of other formats: 2 .zip, 1 .lz4. Convert them to .jsonl"
    )
    assert len(seen(tmp_path, "jsonl", exclude=["*.zip", "*.lz4"])) == 3
    assert caplog.messages == [message]


def test_a_saved_dataset_is_refused_as_arrow(tmp_path: Path) -> None:
    """Bug: its description was read as the data: "First missing column: dataset_info.json, row 0"."""
    write(tmp_path, "train/a.arrow", "train/dataset_info.json", "train/state.json")
    write(tmp_path, "dataset_dict.json")
    with pytest.raises(UserError, match=r"got 1 \.arrow\..*load_from_disk\(FOLDER\)"):
        read_all(tmp_path, "jsonl")


CARD = """---
configs:
- config_name: sft
  data_files:
  - {split: train, path: [sft/a.jsonl, "sft/b*"]}
  - {split: test, path: sft/eval.jsonl}
- config_name: math
  data_dir: math
---
"""


def test_a_configuration_and_split_of_a_dataset_card(tmp_path: Path) -> None:
    """All configurations were read together, test splits included."""
    (tmp_path / "README.md").write_text(CARD)
    configs = card_configs(tmp_path / "README.md")

    def files(**options: Any) -> tuple[list[str], bool]:
        data = DataConfig(path="a/b", kind="jsonl", **options)
        globs, split = config_globs(data, configs)
        names = ["sft/a.jsonl", "sft/b1.jsonl", "sft/eval.jsonl", "math/c/d.jsonl"]
        every = globs or [re.compile("")]
        return [name for name in names if any(g.match(name) for g in every)], split

    assert files(config="sft") == (["sft/a.jsonl", "sft/b1.jsonl"], True)
    assert files(config="sft", split="test") == (["sft/eval.jsonl"], True)
    assert files(config="math") == (["math/c/d.jsonl"], False)
    assert len(files(include=["sft/*"])[0]) == 4  # data.include selects the files
    with pytest.raises(
        UserError, match=r"data\.config must be one of math, sft .*null"
    ):
        files()
    with pytest.raises(UserError, match="got other"):
        files(config="other")


def test_the_limit_of_a_document_is_not_allocated(tmp_path: Path) -> None:
    """Bug: data.max_bytes=1000000000000 ended in a MemoryError for each file."""
    write(tmp_path, "a.py")
    assert seen(tmp_path, max_bytes=2**40) == ["a.py"]
    assert seen(tmp_path, max_bytes=3) == ["too large"]
    assert seen(tmp_path, max_bytes=4) == ["a.py"]
