"""Fixture with the training folders that the tests export."""

from pathlib import Path

import pytest

from tests.conftest import make_once
from tests.train.export.runs import RUNS, train


@pytest.fixture(scope="session")
def runs(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs, trained once on two ranks."""
    return make_once(
        tmp_path_factory,
        "runs",
        lambda folder: train(folder, data_folder, RUNS, ranks=2),
    )
