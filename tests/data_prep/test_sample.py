"""The StarCoder sample with CodeLlama's tokenizer: what the whole promises, on real data.

Every statistical test names its confidence: a right program fails it with that probability,
over seeds; the seed being fixed, it fails always or never.
"""

import csv
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from scipy import stats

from conf import settings
from conf.stage import read_manifest
from data_prep.config import DataPrepConfig
from data_prep.encode import Encoder, Mode
from data_prep.pipeline import prepare
from data_prep.shards import Shards
from data_prep.sources import METADATA
from data_prep.vocab import Vocab, load_tokenizer
from tests.data_prep.conftest import text_of, texts_of

FILTERS_OFF = ["filters.longest_line=null", "filters.mean_line=null", "filters.alphanumeric=null"]


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


@pytest.fixture(scope="module")
def sample(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sample") / "out"
    return prepare_sample(shared_data, out, *FILTERS_OFF, "decontaminate.humaneval=null", "held_out=0")


@pytest.fixture(scope="module")
def sources(shared_data: Path) -> dict[str, str]:
    """The texts by id, read without this project."""
    found = {}
    for path in sorted((shared_data / "starcoder_sample").glob("*/*.parquet")):
        for row in pq.read_table(path).to_pylist():
            name = f"{row['max_stars_repo_name']}/{row['max_stars_repo_path']}/{row['id']}"
            text = METADATA.sub("", row["content"], count=1)
            if text.strip():
                found[f"{path.parent.name}/{name}"] = text
    return found


def test_shards_decode_back_to_the_source_byte_for_byte(sample: Path, sources: dict[str, str]) -> None:
    found = texts_of(sample)
    assert found.keys() == sources.keys() and len(found) > 4000
    assert [id for id, text in sources.items() if found[id].encode() != text.encode()] == []


def test_at_least_99_percent_of_the_slots_are_filled(sample: Path) -> None:
    assert read_manifest(sample, "shards", "out")["train"]["filled"] >= 0.99


def test_modes_have_their_rates(sample: Path) -> None:
    """Exact binomial tests at 99 %. Documents too long for a sequence are plain: they are not counted."""
    modes = {}
    for sequence in Shards(sample, "train"):
        modes.update(zip(sequence.ids, sequence.spans["mode"].tolist(), strict=True))
    long = {
        id
        for sequence in Shards(sample, "train")
        for id, span in zip(sequence.ids, sequence.spans, strict=True)
        if span["mode"] == Mode.PLAIN and span["stop"] - span["start"] + span["offset"] > 16384
    }
    counted = [mode for id, mode in modes.items() if id not in long]
    assert len(long) < 0.03 * len(modes)
    for mode, rate in {Mode.PLAIN: 0.5, Mode.PSM: 0.25, Mode.SPM: 0.25}.items():
        assert stats.binomtest(counted.count(mode), len(counted), rate).pvalue > 0.01


def test_cut_points_are_uniform_over_the_document(sample: Path, sources: dict[str, str]) -> None:
    """Kolmogorov-Smirnov at 99 %, on both cut points of every document laid out in PSM, as decoded."""
    manifest = read_manifest(sample, "shards", "out")
    vocab = Vocab.from_json(manifest["vocab"])
    encoder = Encoder(load_tokenizer(sample / "tokenizer"), vocab)
    smaller, larger = [], []
    for sequence in Shards(sample, "train"):
        for id, span in zip(sequence.ids, sequence.spans, strict=True):
            if span["mode"] != Mode.PSM or len(sources[id]) < 500:
                continue
            ids = sequence.tokens[span["start"] : span["stop"]].tolist()
            suf, mid, eot = (ids.index(piece) for piece in (vocab.suf, vocab.mid, vocab.eot))
            assert text_of(ids, Mode.PSM, vocab, encoder) == sources[id]
            prefix = max(0, len(encoder.decode(ids[2:suf])) - 1)
            middle = len(encoder.decode(ids[mid + 1 : eot]))
            smaller.append(prefix / len(sources[id]))
            larger.append((prefix + middle) / len(sources[id]))
    assert len(smaller) > 800
    # The smaller and the larger of two uniform draws.
    assert stats.kstest(smaller, stats.beta(1, 2).cdf).pvalue > 0.01
    assert stats.kstest(larger, stats.beta(2, 1).cdf).pvalue > 0.01


@pytest.mark.parametrize("by", ["bytes", "files"])
def test_languages_are_within_one_percent_of_the_target(shared_data: Path, tmp_path: Path, by: str) -> None:
    """Of StarCoder's own table, for every language that has its share of the budget, as far as whole
    files allow: within one percent of the share, or half of the largest file that was at stake."""
    table = shared_data / "starcoderdata" / "languages.csv"
    more = ["budget=2M", f"proportion.by={by}", f"proportion.table={table}"]
    manifest = read_manifest(prepare_sample(shared_data, tmp_path / "out", *more), "shards", "out")
    tokens = manifest["train"]["tokens"] + manifest["held_out"]["tokens"]
    assert tokens == pytest.approx(2_000_000, rel=0.03)
    column = {"bytes": "characters", "files": "documents"}[by]
    with table.open() as file:
        wanted = {row["data_dir"]: float(row[column]) for row in csv.DictReader(file)}
    chosen = {name: part for name, part in manifest["chosen"].items() if not part["exhausted"]}
    assert len(chosen) >= 10
    total = sum(part[by] for part in chosen.values())
    known = sum(wanted[name] for name in chosen)
    limit = 1 if by == "files" else manifest["settings"]["data"]["max_bytes"]
    for name, part in chosen.items():
        target = wanted[name] / known * total
        largest = 1 if by == "files" else _largest_file(shared_data / "starcoder_sample" / name)
        assert abs(part[by] - target) <= max(0.01 * target, min(largest, limit) / 2 + 0.01 * target)


def _largest_file(folder: Path) -> int:
    rows = [text for path in folder.glob("*.parquet") for text in pq.read_table(path)["content"].to_pylist()]
    return max(len(text.encode()) for text in rows)
