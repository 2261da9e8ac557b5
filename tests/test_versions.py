"""The ranges in pyproject.toml and the lock; whether the ranges are true is tests/drills/versions.py's."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.drills.versions import ROOT, asked, floor, ranges

PINS = {wanted.name.lower().replace("_", "-"): wanted for wanted in map(Requirement, asked("locked"))}


@pytest.mark.parametrize("wanted", ranges(), ids=lambda wanted: wanted.name)
def test_the_lock_is_within_the_ranges(wanted: Requirement) -> None:
    """Every direct dependency has a floor and a pin, and the pin is allowed."""
    assert floor(wanted)
    (pin,) = PINS[wanted.name.lower().replace("_", "-")].specifier
    assert pin.operator == "==" and wanted.specifier.contains(pin.version)


def test_the_lock_installs_on_the_oldest_python() -> None:
    """soupsieve 4.1.2 stood in the lock and wants Python 3.11.5: on Debian 12, whose Python is 3.11.2, pip
    found no version and launch/setup.sh failed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (oldest,) = (one.version for one in SpecifierSet(project["requires-python"]) if one.operator == ">=")
    refused = {}
    for name, pin in PINS.items():
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        asks = installed.metadata["Requires-Python"] or ""
        if pin.specifier.contains(installed.version) and oldest not in SpecifierSet(asks):
            refused[name] = asks
    assert not refused
