"""Some inputs of each domain of the fuzz drill; python -m tests.drills.fuzz has all."""

import random
from pathlib import Path
from types import ModuleType

import pytest

from tests.drills.fuzz import damage, data, records, requests, settings


@pytest.mark.parametrize(
    ("domain", "count"), [(settings, 14), (data, 24), (requests, 12), (records, 20), (damage, 60)]
)
def test_no_input_is_a_traceback_or_silently_wrong(domain: ModuleType, count: int, tmp_path: Path) -> None:
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert domain.run(random.Random(f"{domain.__name__} {number}"), folder)
