"""The StarCoder sample with CodeLlama's tokenizer: what the whole promises, on real data."""

import csv
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from conf import settings
from conf.stage import read_manifest
from data_prep.config import DataPrepConfig
from data_prep.pipeline import prepare
from data_prep.sources import METADATA
from tests.data_prep.conftest import texts_of

FILTERS_OFF = [
    "filters.longest_line=null",
    "filters.mean_line=null",
    "filters.alphanumeric=null",
]


def prepare_sample(shared: Path, out: Path, *more: str) -> Path:
    arguments = [
        "experiment=starcoder",
        f"data.path={shared / 'starcoder_sample'}",
        f"tokenizer={shared / 'tokenizers' / 'codellama-7b'}",
        f"out={out}",
        "workers=1",
        *more,
    ]
    prepare(settings("data_prep", DataPrepConfig, arguments))
    return out


def test_shards_decode_back_to_the_source_byte_for_byte(
    shared_data: Path, tmp_path: Path
) -> None:
    """The sources are read without this project."""
    sources = {}
    for path in sorted((shared_data / "starcoder_sample").glob("*/*.parquet")):
        for row in pq.read_table(path).to_pylist():
            name = (
                f"{row['max_stars_repo_name']}/{row['max_stars_repo_path']}/{row['id']}"
            )
            text = METADATA.sub("", row["content"], count=1)
            if text.strip():
                sources[f"{path.parent.name}/{name}"] = text
    out = prepare_sample(
        shared_data,
        tmp_path / "out",
        *FILTERS_OFF,
        "decontaminate.humaneval=null",
        "held_out=0",
    )
    texts = texts_of(out)
    assert texts.keys() == sources.keys() and len(texts) > 4000
    assert [
        id for id, text in sources.items() if texts[id].encode() != text.encode()
    ] == []
    assert read_manifest(out, "shards", "out")["train"]["filled"] >= 0.99


@pytest.mark.parametrize("by", ["bytes", "files"])
def test_languages_are_within_one_percent_of_the_target(
    shared_data: Path, tmp_path: Path, by: str
) -> None:
    """Of StarCoder's own table, for every language that has its share of the budget, as far as whole
    files allow: within one percent of the share, or half of the largest file that was at stake."""
    table = shared_data / "starcoderdata" / "languages.csv"
    more = ["budget=2M", f"proportion.by={by}", f"proportion.table={table}"]
    manifest = read_manifest(
        prepare_sample(shared_data, tmp_path / "out", *more), "shards", "out"
    )
    tokens = manifest["train"]["tokens"] + manifest["held_out"]["tokens"]
    assert tokens == pytest.approx(2_000_000, rel=0.03)
    column = {"bytes": "characters", "files": "documents"}[by]
    with table.open() as file:
        expected = {row["data_dir"]: float(row[column]) for row in csv.DictReader(file)}
    chosen = {
        name: part for name, part in manifest["chosen"].items() if not part["exhausted"]
    }
    assert len(chosen) >= 10
    total = sum(part[by] for part in chosen.values())
    known = sum(expected[name] for name in chosen)
    limit = 1 if by == "files" else manifest["settings"]["data"]["max_bytes"]
    for name, part in chosen.items():
        target = expected[name] / known * total
        largest = (
            1
            if by == "files"
            else _largest_file(shared_data / "starcoder_sample" / name)
        )
        assert abs(part[by] - target) <= max(
            0.01 * target, min(largest, limit) / 2 + 0.01 * target
        )


def _largest_file(folder: Path) -> int:
    rows = [
        text
        for path in folder.glob("*.parquet")
        for text in pq.read_table(path)["content"].to_pylist()
    ]
    return max(len(text.encode()) for text in rows)
