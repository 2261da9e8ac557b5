"""README.md and docs/: the site builds without a warning, links lead somewhere, commands are commands."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from conf import UserError, settings
from data_prep.config import DataPrepConfig
from infer.bench.config import BENCHMARKS
from tests.markdown import Command, anchors, commands, links

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = [page for page in PAGES if "_build" not in page.parts]
PACKAGES = ("data_prep", "train", "infer")
RUN = re.compile(r'\brun\("(\w+)", (\w+), main\)')
# Entries behind launch scripts: what the scripts hand their settings to.
SCRIPTS = dict.fromkeys(("train", "train_multinode", "train_slurm"), "train") | {
    "evaluate": "infer.bench"
}


def message(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="sphinx is not installed"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    options = [
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "--nitpicky",
        "--builder",
        "html",
    ]
    answer = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "index.html").is_file()


@pytest.mark.parametrize("page", PAGES, ids=message)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{message(page)}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), (
                f"{message(page)}: {link}"
            )


@pytest.mark.parametrize("page", PAGES, ids=message)
def test_commands_name_entries_and_settings_that_exist(page: Path) -> None:
    for command in commands(page.read_text(encoding="utf-8")):
        problem = check(command)
        assert problem is None, (
            f"{message(page)}: {command.program} {' '.join(command.arguments)}: {problem}"
        )


@pytest.mark.parametrize("name", ["README.md", "docs/codellama_7b.md"])
def test_the_documented_data_are_decontaminated_against_what_is_scored(
    name: str,
) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    (prepared,) = [
        settings("data_prep", DataPrepConfig, command.settings)
        for command in commands(page)
        if command.program == "data_prep" and "experiment=starcoder" in command.settings
    ]
    assert any(command.program == "launch/evaluate.sh" for command in commands(page))
    assert {*BENCHMARKS} - {"lines"} <= prepared.decontaminate.benchmarks.keys()


def check(command: Command) -> str | None:
    """What is wrong with a command of a page; None where nothing is."""
    if command.program.startswith("tests."):
        return _of_drill(command)
    if not command.program.startswith("launch/"):
        return _of_entry(
            command.program, command.settings, multirun="-m" in command.arguments
        )
    if not (ROOT / command.program).is_file():
        return "no such script"
    name = Path(command.program).stem
    return _of_entry(SCRIPTS[name], command.settings) if name in SCRIPTS else None


def _of_drill(command: Command) -> str | None:
    place = ROOT / command.program.replace(".", "/")
    path = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
    if not path.is_file():
        return "no such module"
    text = path.read_text(encoding="utf-8")
    return next(
        (f"no flag {flag}" for flag in command.flags if f'"{flag}"' not in text), None
    )


def _of_entry(module: str, given: list[str], *, multirun: bool = False) -> str | None:
    place = ROOT / module.replace(".", "/")
    files = (place / "__main__.py", place.with_suffix(".py"))
    file = next((path for path in files if path.is_file()), None)
    result = RUN.search(file.read_text(encoding="utf-8")) if file else None
    if file is None or result is None:
        return "no entry with settings"
    entry, schema = result.groups()
    name = f"{module}.__main__" if file.stem == "__main__" else module
    if multirun:  # the first value of each
        given = [re.sub(r"^([\w.]+=)([^\['\"]*?),.*", r"\1\2", word) for word in given]
    try:
        settings(entry, getattr(importlib.import_module(name), schema), given)
    except UserError as error:
        return None if "is required" in str(error) else str(error)
    return None


def test_the_page_of_settings_has_every_dataclass() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"autoclass:: ([\w.]+)", page))
    pending: list[type] = []
    for file in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        if result := RUN.search(file.read_text(encoding="utf-8")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            pending.append(getattr(importlib.import_module(module), result[2]))
    assert len(pending) == 8
    for schema in pending:
        assert f"{schema.__module__}.{schema.__name__}" in listed
        pending += filter(is_dataclass, get_type_hints(schema).values())
