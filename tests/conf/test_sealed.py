"""Files that say whether they are whole."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import UserError
from conf.files import Broken, read_result, sealed, unsealed, write_json
from conf.stage import read_manifest, write_manifest

VALUE: dict[str, Any] = {"a": [1, 2.5, None], "b": {10: "x", 9: "y"}, "half of a pair": "\udcff\ud800"}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Half of a surrogate pair, as a benchmark's id may have, was a UnicodeEncodeError; that of a file's name
    was written as bytes that no reader took.
    """
    write_json(tmp_path / "x.json", sealed(VALUE))
    assert unsealed(tmp_path / "x.json") == read_result(tmp_path / "x.json") == json.loads(json.dumps(VALUE))


@given(st.data())
def test_no_change_of_a_byte_goes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("sealed") / "x.json"
    write_json(path, sealed(VALUE))
    whole, wanted = path.read_bytes(), unsealed(path)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(changed)
    with contextlib.suppress(Broken):
        assert unsealed(path) == wanted  # a space, or a letter of an escape


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1}', '{"crc32": 1}', "[" * 100_000, "\ufeff{}"])
def test_what_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(Broken, match="cannot be read|has another checksum"):
        unsealed(tmp_path / "x.json")


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    """A digit of it was another setting, another id or another step, and a field less a KeyError later on."""
    write_manifest(tmp_path, "shards", {"settings": {}}, seq_len=128)
    assert read_manifest(tmp_path, "shards", "data.path")["seq_len"] == 128
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace("128", "129"))
    with pytest.raises(UserError, match="manifest.json must be as it was written, got it changed since"):
        read_manifest(tmp_path, "shards", "data.path")
    path.write_text('{"kind": "shards"}')  # of an earlier version
    assert read_manifest(tmp_path, "shards", "data.path") == {"kind": "shards"}
