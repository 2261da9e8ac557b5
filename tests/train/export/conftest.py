"""The training folders that exports are made of."""

from pathlib import Path

import pytest

from tests.conftest import make_once
from tests.train.export.runs import RUNS, train


@pytest.fixture(scope="session")
def runs(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run, on two ranks, trained once."""
    return make_once(
        tmp_path_factory,
        "runs",
        lambda folder: train(folder, data_folder, RUNS, ranks=2),
    )
