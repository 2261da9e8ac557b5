"""Datasets by the library that reads the hub's: of a folder laid out as the hub's are, and out of reach."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf import UserError
from infer.benchmarks import BenchmarkConfig, PromptSetConfig
from infer.benchmarks.reading import KINDS, read_problems
from infer.benchmarks.rows import Dataset
from tests.infer.benchmarks.test_kinds import task

CARD = """---
configs:
- config_name: sanitized
  data_files:
  - {split: prompt, path: prompt.parquet}
  - {split: test, path: test.parquet}
---
"""


@pytest.fixture(autouse=True)
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and nothing written to the user's home."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_dataset_is_read_by_configuration_and_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text(CARD)
    for split, ids in (("prompt", (2, 3, 4)), ("test", (11, 12))):
        pq.write_table(pa.Table.from_pylist([task(id) for id in ids]), tmp_path / f"{split}.parquet")
    dataset = Dataset(str(tmp_path), "sanitized", ("prompt", "test"))
    for name in ("mbpp", "gsm8k"):
        monkeypatch.setitem(KINDS, name, replace(KINDS[name], datasets=lambda _: [dataset]))
    result = read_problems("mbpp", BenchmarkConfig(shots=3))
    assert [item.id for item in result] == ["MBPP/11", "MBPP/12"] and "Task 4." in str(result[0].prompt)
    with pytest.raises(UserError, match="sanitized, row 1 must be JSON with a text 'question'"):
        read_problems("gsm8k", PromptSetConfig())


def test_the_languages_asked_for_are_those_loaded() -> None:
    of = KINDS["multipl_e"].datasets
    assert [item.configuration for item in of(["rs"])] == ["humaneval-rs"]
    paper = [f"humaneval-{language}" for language in ("cpp", "java", "php", "ts", "cs", "sh")]
    assert [item.configuration for item in of([])] == paper


@pytest.mark.parametrize("name", ["infilling", "multipl_e", "mbpp", "gsm8k", "alpaca"])
def test_a_dataset_out_of_reach_is_one_sentence_that_asks_for_a_file(name: str) -> None:
    message = rf"prompts\.{name}\.path: .* from the hub.*prompts\.{name}\.path=FILE$"
    with pytest.raises(UserError, match=message):
        read_problems(name, PromptSetConfig())


def test_a_line_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library tries again and again, each time with a long timeout."""
    over, began = threading.Event(), time.monotonic()
    monkeypatch.setattr("infer.benchmarks.rows._load", lambda dataset: over.wait(60))
    monkeypatch.setattr("infer.benchmarks.rows.PATIENCE", 0.1)
    with pytest.raises(UserError, match=r"gsm8k must come from the hub, got TimeoutError: .* Give"):
        read_problems("gsm8k", PromptSetConfig())
    over.set()
    assert time.monotonic() - began < 10
