"""The StarCoder sample with CodeLlama's tokenizer: what the whole promises, on real data."""

from pathlib import Path

import pyarrow.parquet as pq

from conf import settings
from conf.stage import read_manifest
from data_prep.config import DataPrepConfig
from data_prep.pipeline import prepare
from data_prep.sources import METADATA
from tests.data_prep.conftest import texts_of

KEYS = ("name", "path")
LIMITS = ("longest_line", "mean_line", "alphanumeric")


def test_shards_decode_back_to_the_source_byte_for_byte(
    shared_data: Path, tmp_path: Path
) -> None:
    """The sources are read without this project."""
    root = shared_data / "starcoder_sample"
    sources = {}
    for path in root.glob("*/*.parquet"):
        for row in pq.read_table(path).to_pylist():
            parts = (path.parent.name, *(row[f"max_stars_repo_{x}"] for x in KEYS))
            text = METADATA.sub("", row["content"], count=1)
            if text.strip():
                sources["/".join([*parts, row["id"]])] = text
    given = [
        "experiment=starcoder",
        f"data.path={root}",
        "held_out=0",
        "ngrams.megabytes=0",
    ]
    given += [f"tokenizer={shared_data / 'tokenizers' / 'codellama-7b'}"]
    given += [f"filters.{name}=null" for name in LIMITS]
    given += [f"out={tmp_path / 'out'}", "decontaminate.humaneval=null"]
    prepare(settings("data_prep", DataPrepConfig, given))
    texts = texts_of(tmp_path / "out")
    assert texts == sources and len(texts) > 4000
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["train"]["filled"] >= 0.99
