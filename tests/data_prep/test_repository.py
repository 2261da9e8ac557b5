"""A user's own repository: what is read of it, what is held out, and what is said of too little."""

import json
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import settings
from data_prep.config import DataPrepConfig
from data_prep.document import held_out_share, is_held_out
from data_prep.pipeline import prepare
from data_prep.tables import warnings


@given(st.integers(0, 60), st.integers(0, 12), st.sampled_from([0.0, 0.01, 0.3]), st.integers(0, 5))
def test_a_few_files_are_held_out_of_a_small_repository(
    files: int, least: int, share: float, seed: int
) -> None:
    """17 files had no held-out document at a share of 0.01, and training refused the data."""
    ids = [f"src/{n}.py" for n in range(files)]
    held_out = held_out_share(ids, seed=seed, share=share, least=least)
    count = sum(is_held_out(id, seed=seed, share=held_out) for id in ids)
    by_share = sum(is_held_out(id, seed=seed, share=share) for id in ids)
    assert count == (max(by_share, min(least, files // 5)) if share else 0)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """17 files of the standard library, and what tools put beside sources."""
    root = tmp_path / "repository"
    files = sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))[:17]
    for path in files:
        (root / "src").mkdir(parents=True, exist_ok=True)
        (root / "src" / path.name).write_text(path.read_text())
    for name in (
        ".git/config",
        ".venv/lib/a.py",
        "node_modules/m/i.js",
        "build/x.py",
        "web/app.min.js",
        "a/__pycache__/b.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("def never_read():\n    return 1\n" * 9)
    return root


def prepared(repository: Path, tokenizer: Path, out: Path, *more: str) -> dict:
    args = [
        f"data.path={repository}",
        f"tokenizer={tokenizer}",
        "vocab=demo",
        "seq_len=512",
        "workers=1",
        f"out={out}",
    ]
    prepare(settings("data_prep", DataPrepConfig, [*args, *more]))
    return json.loads((out / "manifest.json").read_text())


def test_a_repository_is_prepared_without_further_settings(
    repository: Path, data_folder: Path, tmp_path: Path
) -> None:
    manifest = prepared(repository, data_folder / "tokenizer", tmp_path / "data", "data.split_chars=700")
    assert manifest["counts"]["rows"] == 17 and list(manifest["languages"]) == ["py"]
    files = {json.loads(line)["id"].split("#")[0] for line in (tmp_path / "data" / "held_out.jsonl").open()}
    assert len(files) == 3 and not list(warnings(manifest))


def test_a_split_of_too_little_is_warned_of(repository: Path, data_folder: Path, tmp_path: Path) -> None:
    """An empty split was first told of by training."""
    manifest = prepared(
        repository, data_folder / "tokenizer", tmp_path / "data", "seq_len=65536", "shard_tokens=65536"
    )
    assert [warning.split(" must")[0] for warning in warnings(manifest)] == ["train", "held_out"]
    assert "smaller seq_len" in next(warnings(manifest))
