"""Test the lock file. CONTRIBUTING.md tells how to run the tests at both ends of the version ranges."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LOCK = map(Requirement, (ROOT / "requirements.lock").read_text("utf-8").splitlines())
PINS = {pin.name.lower().replace("_", "-"): pin for pin in LOCK}


def test_the_lock_installs_on_the_oldest_python() -> None:
    """Bug: launch/setup.sh failed with Debian 12's Python 3.11.2, because soupsieve 4.1.2 needs 3.11.5."""
    (oldest,) = SpecifierSet(PROJECT["requires-python"])
    refused = []
    for name, pin in PINS.items():
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        allowed = SpecifierSet(installed.metadata["Requires-Python"] or "")
        if pin.specifier.contains(installed.version) and oldest.version not in allowed:
            refused.append(name)
    assert not refused
