"""A disk that takes no more in the middle of a preparation."""

import sys
from pathlib import Path

import pytest

from conf import run
from conf.stage import partial_of
from data_prep.__main__ import main
from data_prep.config import DataPrepConfig
from tests.conftest import data_arguments
from tests.full_disk import largest_file
from tests.told import error


@pytest.mark.parametrize("size", [1000, 200_000])
def test_it_is_told_in_a_sentence_and_gone_on_with(
    size: int,
    tmp_path: Path,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["data_prep", *data_arguments(out)])
    with largest_file(size), pytest.raises(SystemExit) as end:
        run("data_prep", DataPrepConfig, main)
    assert end.value.code == 2 and "File too large" in error(capsys.readouterr().err)
    assert not out.exists()
    run("data_prep", DataPrepConfig, main)
    assert not partial_of(out).exists()
    for path in data_folder.glob("*.npy"):
        assert (out / path.name).read_bytes() == path.read_bytes()
