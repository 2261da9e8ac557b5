"""A small real input in several parts, and what one worker makes of it."""

import json
import sysconfig
from pathlib import Path

import pytest

from conf import settings
from conf.stage import read_manifest
from data_prep.config import DataPrepConfig
from data_prep.pipeline import prepare

BAD_LINES = ['{"content": "x', '{"text": 1}', '{"content": "  "}', "[]"]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six parts of three languages: files of the standard library, and a few bad rows."""
    root = tmp_path_factory.mktemp("jsonl")
    paths = sorted(Path(sysconfig.get_path("stdlib"), "email").rglob("*.py"))
    paths += sorted(Path(sysconfig.get_path("stdlib"), "json").rglob("*.py"))
    paths = [path for path in paths if path.stat().st_size]
    for index in range(6):
        part = root / f"lang{index % 3}" / f"{index}.jsonl"
        part.parent.mkdir(exist_ok=True)
        rows = [json.dumps({"content": path.read_text()}) for path in paths[index::6]]
        part.write_text("\n".join([*rows, BAD_LINES[index % 4]]) + "\n")
    return root


def arguments(jsonl: Path, tokenizer: Path, out: Path, *more: str) -> list[str]:
    return [
        "data=jsonl",
        "vocab=demo",
        f"data.path={jsonl}",
        f"tokenizer={tokenizer}",
        "seq_len=512",
        "held_out=0.2",
        "shard_tokens=30000",
        "max_unreadable=0.5",
        f"out={out}",
        *more,
    ]


def run(arguments: list[str]) -> None:
    prepare(settings("data_prep", DataPrepConfig, arguments))


def content(folder: Path) -> dict[str, bytes]:
    """Every file; of the manifest what does not tell of the run."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    found = {name: path.read_bytes() for name, path in files.items() if name != "manifest.json"}
    manifest = read_manifest(folder, "shards", "out")
    kept = {
        key: value for key, value in manifest.items() if key not in ("created", "commit", "seconds", "versions")
    }
    return {**found, "manifest": json.dumps(kept, sort_keys=True).encode()}


@pytest.fixture(scope="module")
def expected(jsonl: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one worker makes, in one go."""
    out = tmp_path_factory.mktemp("expected") / "out"
    run(arguments(jsonl, data_folder / "tokenizer", out, "workers=1"))
    assert len(read_manifest(out, "shards", "out")["train"]["shards"]) > 2
    return content(out)
