"""The fuzz drill's domains, some inputs of each; python -m tests.drills.fuzz has all. Damaged model directories
have tests of their own (tests/infer/test_damaged.py).
"""

import random
from pathlib import Path
from types import ModuleType

import pytest

from tests.drills.fuzz import (
    checkpoints,
    parquet,
    prompts,
    records,
    rows,
    settings,
    shards,
    sources,
    tokenizers,
)


@pytest.mark.parametrize(
    ("domain", "count"),
    [
        *((settings, 12), (rows, 8), (parquet, 8), (sources, 8), (shards, 25), (tokenizers, 8)),
        *((prompts, 12), (checkpoints, 12), (records, 20)),
    ],
)
def test_no_input_is_a_traceback_or_silently_wrong(domain: ModuleType, count: int, tmp_path: Path) -> None:
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert domain.run(random.Random(f"{domain.__name__} {number}"), folder)
