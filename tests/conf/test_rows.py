"""The file formats of rows that docs/data.md and docs/evaluation.md list."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.text import rows
from conf.text.rows import json_values, read_rows

ROWS = [{"a": 'é\n"[{', "b": "1"}, {"a": "", "b": "2"}]


def as_csv(delimiter: str) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["a", "b"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue().encode()


def as_parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), out)
    return out.getvalue()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "JSON lines": ("a.jsonl", lambda: LINES),
    "JSON lines with a mark of UTF-8": ("a.ndjson", lambda: b"\xef\xbb\xbf" + LINES),
    "a JSON list": ("a.json", lambda: json.dumps(ROWS).encode()),
    "an indented JSON list": ("a.json", lambda: json.dumps(ROWS, indent=2).encode()),
    "indented objects": (
        "a.json",
        lambda: "\n".join(json.dumps(row, indent=4) for row in ROWS).encode(),
    ),
    "CSV": ("a.csv", lambda: as_csv(",")),
    "TSV": ("a.tsv", lambda: as_csv("\t")),
    "parquet": ("a.parquet", as_parquet),
    "gzip": ("a.jsonl.gz", lambda: gzip.compress(LINES)),
    "bzip2": ("a.jsonl.bz2", lambda: bz2.compress(LINES)),
    "xz": ("a.json.xz", lambda: lzma.compress(json.dumps(ROWS).encode())),
    "zst": ("a.jsonl.zst", lambda: pa.Codec("zstd").compress(LINES, asbytes=True)),
}


@pytest.mark.parametrize("form", FILES)
def test_forms_of_files(tmp_path: Path, form: str) -> None:
    name, content = FILES[form]
    (tmp_path / name).write_bytes(content())
    assert read_rows(tmp_path / name) == ROWS


def test_calls_of_parquet_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    """Bug: tool calls of prompts had null for the arguments of other rows' calls."""
    calls = [{"call": {"city": "Oslo"}}, {"call": {"a": 1}}]
    pq.write_table(pa.Table.from_pylist(calls), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == calls


def test_a_malformed_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES + b'{"a": \n[1]\n' + LINES)
    bad: list[str] = []
    assert read_rows(path, bad) == ROWS * 2
    assert [sentence.partition(":")[0] for sentence in bad] == ["line 3", "line 4"]
    with pytest.raises(ValueError):
        read_rows(path)


@pytest.mark.parametrize("blank", [b"\n", b" \r\n\n"])
def test_blank_lines_before_a_list(tmp_path: Path, blank: bytes) -> None:
    """Bug: its lines were read as JSON lines: all were bad, or only the last object was kept."""
    path = tmp_path / "a.json"
    for indent in (0, 2):
        path.write_bytes(blank + json.dumps(ROWS, indent=indent).encode())
        assert read_rows(path) == ROWS


def test_a_line_that_is_no_object_or_not_utf_8_loses_its_row(tmp_path: Path) -> None:
    """Bug: one wrong byte refused the whole file, and [] or [["a", 1]] were rows."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES + b'{"a": "\xff"}\n[]\n[["a", 1]]\n' + LINES)
    bad: list[str] = []
    assert read_rows(path, bad) == ROWS * 2
    assert [sentence.partition(":")[0] for sentence in bad] == [
        *("line 3", "line 4", "line 5")
    ]


@given(
    st.lists(
        st.dictionaries(st.text(), st.text() | st.lists(st.integers())), max_size=6
    ),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.integers(1, 40),
)
def test_values_do_not_depend_on_the_size_of_reads(
    values: list[dict[str, object]], listed: bool, indent: int | None, chunk: int
) -> None:
    texts = [json.dumps(value, indent=indent) for value in values]
    text = f"[{', '.join(texts)}]" if listed else "\n".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "CHUNK", chunk)
        assert list(json_values(io.StringIO(text), 10**6)) == values
        if listed:  # a list that does not end
            with pytest.raises(ValueError):
                list(json_values(io.StringIO(text[:-1]), 10**6))
