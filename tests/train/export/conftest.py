"""The training folders that exports are made of: trained once."""

from pathlib import Path

import pytest

from tests.train.export.runs import RUNS, train


@pytest.fixture(scope="session")
def runs(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run, on two ranks."""
    return train(tmp_path_factory.mktemp("runs"), data_folder, RUNS, ranks=2)
