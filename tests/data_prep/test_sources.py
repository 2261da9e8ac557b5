import bz2
import gzip
import json
import lzma
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import UserError
from data_prep.config import DataConfig
from data_prep.document import Document, Drop
from data_prep.sources import InputPart, list_parts, read

STARCODER = ["max_stars_repo_name", "max_stars_repo_path", "id"]


def rows(data: DataConfig) -> list[Document | Drop]:
    parts, place = list_parts(data)
    return [row for part in parts for row in read(part, place, data)]


def seen(data: DataConfig) -> list[str]:
    """Texts of documents, reasons of drops."""
    return [row.text if isinstance(row, Document) else row.reason for row in rows(data)]


def write(root: Path, *names: str) -> None:
    """Write files that hold their own names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def write_parquet(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_source_files_keep_their_line_ends_and_are_counted_when_they_are_no_text(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.py").write_bytes(b"y = 1\r\n")
    (tmp_path / "c.py").write_text("x" * 200)
    (tmp_path / "d").write_text("<filename>kept\n")
    write(
        tmp_path, ".git/config", ".github/e.yml"
    )  # the store of a checkout is no source
    data = DataConfig(path=str(tmp_path), max_bytes=100)
    assert seen(data) == [
        ".github/e.yml",
        "undecodable",
        "y = 1\r\n",
        "too large",
        "<filename>kept\n",
    ]
    documents = [row for row in rows(data) if isinstance(row, Document)][1:]
    assert [(d.id, d.language, d.file) for d in documents] == [
        ("b.py", "py", "b.py"),
        ("d", "none", "d"),
    ]


def test_small_source_files_are_read_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.sources.PART_BYTES", 2)
    write(tmp_path, *"abcde")
    parts, _ = list_parts(DataConfig(path=str(tmp_path)))
    assert parts == [
        InputPart(("a", "b"), 2),
        InputPart(("c", "d"), 2),
        InputPart(("e",), 1),
    ]


def test_starcoder_parquet_is_read_and_its_metadata_stripped_once(
    tmp_path: Path,
) -> None:
    texts = [
        "<reponame>a/b<gh_stars>1\nx = 1\n",
        "y = 2\n<filename>kept\n",
        "<filename>a\n<filename>b\n",
    ]
    columns = {name: ["p", "q", "r"] for name in STARCODER}
    write_parquet(tmp_path / "python" / "train-0.parquet", content=texts, **columns)
    data = DataConfig(path=str(tmp_path), kind="parquet", id=STARCODER)
    assert seen(data) == ["x = 1\n", "y = 2\n<filename>kept\n", "<filename>b\n"]
    first = rows(data)[0]
    assert isinstance(first, Document)
    assert (first.id, first.language, first.row) == ("python/p/p/p", "python", 0)


def test_parquet_that_cannot_be_read_is_reported_with_its_file(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", content=["x = 1\n", None], id=["1", "2"])
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.parquet").write_bytes(b"")
    write_parquet(tmp_path / "d.parquet", text=["x"], id=["1"])
    # Arrow verifies no checksum unless it is asked to: the text was another, without a word.
    table = pa.table({"content": ["x = 1\n"], "id": ["1"]})
    pq.write_table(
        table, tmp_path / "e.parquet", compression="none", write_page_checksum=True
    )
    changed = (tmp_path / "e.parquet").read_bytes().replace(b"x = 1\n", b"x = 3\n", 1)
    (tmp_path / "e.parquet").write_bytes(changed)
    data = DataConfig(path=str(tmp_path), kind="parquet", id=["id"])
    drops = [
        (row.file, row.row, row.reason) for row in rows(data) if isinstance(row, Drop)
    ]
    assert seen(data)[0] == "x = 1\n" and drops == [
        ("a.parquet", 1, "missing column"),
        ("b.parquet", None, "unreadable file"),
        ("c.parquet", None, "unreadable file"),
        ("d.parquet", None, "missing column"),
        ("e.parquet", None, "unreadable file"),
    ]


PLAIN = ["x = 1", "y = 2", "z = 3"]
TEXTS = pa.array([b"x = 1", b"\xff", b"z = 3"], pa.binary()).view(
    pa.string()
)  # one is no UTF-8
LARGE = TEXTS.cast(pa.binary()).cast(pa.large_binary()).view(pa.large_string())
ONE_BAD = ["x = 1", "undecodable", "z = 3"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        # Arrow's to_pylist raised UnicodeDecodeError for the whole batch.
        ([TEXTS], ONE_BAD),
        # Only the text's column, and plain strings, were read as bytes: the rest of the file was lost.
        ([PLAIN, TEXTS], ONE_BAD),
        (
            [
                PLAIN,
                pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), TEXTS),
            ],
            ONE_BAD,
        ),
        *(
            (
                [pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None]), texts)],
                [*ONE_BAD, "missing column"],
            )
            for texts in (TEXTS, LARGE)
        ),
        # A date out of range was a traceback, and so was a column twice.
        (
            [PLAIN, pa.array([0, 0, 2**60], pa.timestamp("ms"))],
            ["x = 1", "y = 2", "malformed row"],
        ),
        ([PLAIN, PLAIN, PLAIN], ["column twice"]),
    ],
)
def test_what_parquet_holds_costs_a_row_and_no_more(
    tmp_path: Path, columns: list[Any], expected: list[str]
) -> None:
    names = ["content", "id", "id"][: len(columns)]
    pq.write_table(pa.table(columns, names=names), tmp_path / "a.parquet")
    assert (
        seen(DataConfig(path=str(tmp_path), kind="parquet", id=names[1:2])) == expected
    )


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_an_archive_of_no_bytes_is_a_broken_file(tmp_path: Path, suffix: str) -> None:
    """A download that was cut off at once was read as a file without rows, and counted nowhere."""
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b"")
    (tmp_path / f"b.json{suffix}").write_bytes(b"no archive")
    (tmp_path / "c.jsonl").write_bytes(b"")
    data = DataConfig(path=str(tmp_path), kind="jsonl")
    assert seen(data) == ["unreadable file", "unreadable file"]


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    """No glob of pathlib enters them: a corpus put together of links was read in part, without a word."""
    write(tmp_path, "in/python/a.py", "elsewhere/c/b.c", "elsewhere/c/more/d.c")
    (tmp_path / "in" / "c").symlink_to(tmp_path / "elsewhere" / "c")
    (tmp_path / "in" / "c_again").symlink_to(tmp_path / "elsewhere" / "c")
    (tmp_path / "in" / "latest").symlink_to("python")
    (tmp_path / "elsewhere" / "c" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "e.py").symlink_to(tmp_path / "in" / "python" / "a.py")
    parts, _ = list_parts(DataConfig(path=str(tmp_path / "in")))
    assert parts[0].files == ("c/b.c", "c/more/d.c", "e.py", "python/a.py")


def test_links_to_nothing_and_closed_folders_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were left out without a word."""
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "gone\x1b.py").symlink_to("nothing")
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert seen(DataConfig(path=str(tmp_path))) == ["x = 1\n"]
    assert caplog.messages == [
        f"data.path: 2 links lead to no file and are left out, first {tmp_path}/gone\\x1b.py",
        f"data.path: 1 folders cannot be listed and are left out, first {tmp_path}/closed",
    ]
    caplog.clear()
    seen(DataConfig(path=str(tmp_path), exclude=["closed/*"], include=["a.py"]))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("pattern", "target"),
    [
        ("**/*", ["a.py", "x/b.py", "x/y/c.c"]),
        ("*.py", ["a.py"]),
        ("**/*.py", ["a.py", "x/b.py"]),
        ("x/*", ["x/b.py"]),
        ("x/**/*", ["x/b.py", "x/y/c.c"]),
        ("[!a]/?/*.[ch]", ["x/y/c.c"]),
    ],
)
def test_globs_are_those_of_pathlib(
    tmp_path: Path, pattern: str, target: list[str]
) -> None:
    write(tmp_path, "a.py", "x/b.py", "x/y/c.c")
    assert seen(DataConfig(path=str(tmp_path), include=[pattern])) == target
    assert (
        sorted(
            str(p.relative_to(tmp_path)) for p in tmp_path.glob(pattern) if p.is_file()
        )
        == target
    )


def test_sizes_are_in_bytes_and_a_byte_order_mark_belongs_to_no_row(
    tmp_path: Path,
) -> None:
    """JSON lines were measured in characters."""
    (tmp_path / "a.jsonl").write_text('\ufeff{"content": "éé"}\n{"content": "ee"}\n')
    assert seen(DataConfig(path=str(tmp_path), kind="jsonl", max_bytes=3)) == [
        "too large",
        "ee",
    ]


def test_a_file_whose_name_is_no_utf8(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff.py", "w") as file:
        file.write("x = 1\n")
    assert seen(DataConfig(path=str(tmp_path))) == ["undecodable"]


LINES = [
    b'{"content": "x = 1\\n", "language": "python"}',
    b'{"content": "x',
    b"",
    b'{"content": "\xff"}',
    b"[1]",
    b'{"text": "x"}',
    b'{"content": 5, "language": "c"}',
    b'{"content": "\\ud800", "language": "c"}',
    b"[" * 100_000,
    b'{"content": "<gh_stars>1\\ny = 2", "language": "c"}',
]
REASONS = [
    "x = 1\n",
    "malformed row",
    "undecodable",
    "malformed row",
    "missing column",
    "malformed row",
]
REASONS += ["undecodable", "malformed row", "y = 2"]


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".jsonl", bytes),
        (".jsonl.gz", gzip.compress),
        (".jsonl.zst", lambda data: pa.Codec("zstd").compress(data, asbytes=True)),
        # These were passed over without a word where other files lay beside them.
        (".jsonl.bz2", bz2.compress),
        (".json.xz", lzma.compress),
    ],
)
def test_json_lines_are_read_and_bad_ones_reported_with_their_row(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / f"a{suffix}").write_bytes(pack(b"\n".join(LINES)))
    config = DataConfig(path=str(tmp_path), kind="jsonl", language="language")
    assert seen(config) == REASONS
    assert [row.row for row in rows(config)] == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    last = rows(config)[-1]
    assert isinstance(last, Document) and (last.id, last.language) == (
        f"a{suffix}:9",
        "c",
    )


def test_a_line_of_100_mb_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(b'{"content": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"content": "y = 2"}\n')
    data = DataConfig(path=str(tmp_path), kind="jsonl", max_bytes=1000)
    assert seen(data) == ["line too large", "y = 2"]
    assert rows(data)[1].row == 1


def test_what_comes_before_the_broken_place_of_an_archive_is_kept(
    tmp_path: Path,
) -> None:
    lines = [json.dumps({"content": f"x = {i}"}) for i in range(2000)]
    whole = gzip.compress("\n".join(lines).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    result = seen(DataConfig(path=str(tmp_path), kind="jsonl"))
    assert result[:2] == ["x = 0", "x = 1"] and result[-1] == "unreadable file"
    assert set(result[:-1]) < {f"x = {i}" for i in range(2000)} | {"malformed row"}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
ROWS = st.dictionaries(st.sampled_from(["content", "language", "id", "x"]), VALUES).map(
    lambda row: json.dumps(row).encode()
)


@given(st.lists(st.binary(max_size=30) | ROWS | st.sampled_from(LINES), max_size=8))
def test_no_bytes_make_reading_fail(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.jsonl").write_bytes(b"\n".join(lines))
        for row in rows(
            DataConfig(path=folder, kind="jsonl", language="language", id=["id"])
        ):
            assert isinstance(row, Drop) or f"{row.text}{row.id}{row.language}".encode()


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_no_damage_to_parquet_makes_reading_fail(damage: bytes, place: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.parquet")
        write_parquet(path, content=[f"x = {i}\n" for i in range(50)])
        whole = path.read_bytes()
        path.write_bytes(whole[:place] + damage + whole[place + len(damage) :])
        assert all(
            isinstance(row, Document | Drop)
            for row in rows(DataConfig(path=folder, kind="parquet"))
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"include": ["*.c"]}, r"must have source files \(\*\.c\), got none"),
        ({"kind": "parquet"}, "must have parquet files .* got none"),
        ({"path": "/absent"}, "got no such folder"),
        ({"include": [""]}, r"data\.include=.*must be globs below data\.path"),
        ({"include": ["/abs/*.py"]}, r"data\.include=.*must be globs below data\.path"),
        (
            {"exclude": ["a*", "c*"]},
            r"must have source files \(\*\*/\*, and none of a\*, c\*\), got none",
        ),
    ],
)
def test_no_input_at_all_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    write(tmp_path, "a.py")
    with pytest.raises(UserError, match=message):
        list_parts(DataConfig(**{"path": str(tmp_path), **config}))


def test_a_file_that_the_machine_cannot_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were lost for good: a lack of memory, or of open files, was counted as a broken file."""
    write_parquet(tmp_path / "a.parquet", content=["x = 1\n"])
    data = DataConfig(path=str(tmp_path), kind="parquet")
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="a.parquet must fit into memory"),
    ):
        patch.setattr(
            pq,
            "ParquetFile",
            Mock(side_effect=pa.ArrowMemoryError("malloc of size 8 failed")),
        )
        rows(data)
    parts, place = list_parts(data)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(
        UserError,
        match="a.parquet must be readable, got No such file or directory. Rerun",
    ):
        list(read(parts[0], place, data))


def test_files_are_left_out_by_globs(tmp_path: Path) -> None:
    """StarCoder's commits have other columns: its documented command was refused after all had been read."""
    write_parquet(tmp_path / "python" / "a.parquet", content=["x = 1\n"])
    write_parquet(tmp_path / "git-commits-cleaned" / "a.parquet", message=["m"])
    data = DataConfig(path=str(tmp_path), kind="parquet", exclude=["git-commits-*/*"])
    assert seen(data) == ["x = 1\n"]


def test_a_linked_folder_that_is_wanted_by_the_links_name_alone(tmp_path: Path) -> None:
    """Its target was met first, under a name that include or exclude leaves out: its texts were lost without a
    word.
    """
    write(tmp_path, "releases/42/a.py")
    (tmp_path / "current").symlink_to("releases/42")
    (tmp_path / "releases" / "up").symlink_to("..")
    for chosen in ({"include": ["current/**/*.py"]}, {"exclude": ["releases/*"]}):
        parts, _ = list_parts(DataConfig(path=str(tmp_path), **chosen))
        assert parts[0].files == ("current/a.py",)
