"""GOMP_SPINCOUNT: set before PyTorch is imported, unless the user has decided it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.openmp import OWN_CHOICE, SPIN_COUNT, shorten_spin

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "30"}, {"GOMP_SPINCOUNT": "30"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_the_users_own_choice_stays(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    shorten_spin(given)
    assert given == expected


def test_libgomp_reads_it_where_the_package_is_imported() -> None:
    """Two threads spun beside one busy process: decoding fell to a tenth."""
    env = {name: os.environ[name] for name in os.environ if name not in OWN_CHOICE}
    run = subprocess.run(
        [sys.executable, "-c", "import infer; import torch"],
        cwd=ROOT,
        env=env | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    if SPIN_COUNT not in run.stderr:
        pytest.skip("PyTorch's OpenMP is not libgomp here")
    assert "GOMP_SPINCOUNT = '1000'" in run.stderr
