"""docs/settings is what the dataclasses and the YAML say, and every link of an error leads somewhere."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from conf import UserError, errors, settings
from conf.compose import config_groups
from conf.help import Entry, describe, link
from docs.reference import ENTRIES, FOLDER, page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# What the pages that are not written yet will have.
AGREED = {
    "low-acceptance",
    "slow",
    "custom-generate",
    "hub-and-offline",
    "not-identical",
    "diverged",
}
AGREED |= {
    "loss-of-quality",
    "out-of-memory",
    "unfinished-folder",
    "another-configuration",
}


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    return {name: describe(name, schema) for name, schema in ENTRIES.items()}


def anchors(text: str) -> list[str]:
    """Of headings, as GitHub and MyST make them, and those that are written out."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    built = [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    ]
    written = re.findall(r'<a id="([^"]+)"', text) + re.findall(
        r"^\(([\w-]+)\)=$", text, re.MULTILINE
    )
    return built + written


def test_every_stage_has_a_page() -> None:
    calls = [
        call.args
        for package in ("data_prep", "train", "infer")
        for path in (ROOT / package).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "run"
        and len(call.args) == 3
    ]
    called = {
        call[0].value: ast.unparse(call[1])
        for call in calls
        if isinstance(call[0], ast.Constant)
    }
    assert called == {name: schema.__name__ for name, schema in ENTRIES.items()}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_page_is_what_the_code_says_now(
    name: str, entries: dict[str, Entry]
) -> None:
    """After a change of settings: python -m docs.reference."""
    assert (FOLDER / f"{name}.md").read_text(encoding="utf-8") == page(entries[name])


@pytest.mark.parametrize("name", ENTRIES)
def test_every_setting_and_every_choice_says_what_it_is(
    name: str, entries: dict[str, Entry]
) -> None:
    entry = entries[name]
    for section in entry.sections:
        assert section.text or not section.name
        for setting in section.settings:
            assert setting.description, (
                f"{name}: {setting.name} has no comment at its field"
            )
    for group in entry.groups:
        for choice in group.choices:
            where = f"conf/{name}/{group.name}/{choice.name}.yaml"
            assert choice.lines and choice.lines[0].endswith("."), (
                f"{where}: wanted a sentence on its first line"
            )


@pytest.mark.parametrize("name", ENTRIES)
def test_every_example_is_a_command_that_composes(
    name: str, entries: dict[str, Entry]
) -> None:
    entry = entries[name]
    module = entry.command.split()[-1]
    assert entry.examples
    for example in entry.examples:
        words = shlex.split(example)
        start = (
            words.index(module) if module in words else words.index("launch/train.sh")
        )
        settings(name, ENTRIES[name], words[start + 1 :])


@pytest.mark.parametrize("name", ENTRIES)
def test_every_derived_link_leads_to_a_place_on_the_page(
    name: str, entries: dict[str, Entry]
) -> None:
    entry, schema = entries[name], ENTRIES[name]
    chosen = tuple(group.name for group in config_groups(name))
    message = [
        setting.name for section in entry.sections for setting in section.settings
    ]
    message += [*chosen, *(section.name for section in entry.sections if section.name)]
    text = page(entry)
    for setting in message:
        result = link(f"{setting}: wanted this, found that", None, name, schema)
        assert result and anchors(text).count(result.partition("#")[2]) == 1, setting


@pytest.mark.parametrize(
    "override",
    [
        "nonsense=1",
        "out=[",
        "experiment=x",
        "seed=x",
        "~nothing",
        "+seed=1",
        "k=",
        "model.x=1",
        "=3",
    ],
)
@pytest.mark.parametrize("name", ["data_prep", "train", "infer", "bench"])
def test_any_mistake_is_a_sentence(name: str, override: str) -> None:
    try:
        settings(name, ENTRIES[name], [override])
    except UserError as error:
        assert "\n" not in str(error) and "hydra.cc" not in str(error), error


def test_every_page_that_an_error_names_is_there() -> None:
    named = {
        value
        for value in vars(errors).values()
        if isinstance(value, str) and ".md#" in value
    }
    for package in ("conf", "data_prep", "train", "infer"):
        for path in (ROOT / package).rglob("*.py"):
            named |= set(
                re.findall(r'page="([^"]+)"', path.read_text(encoding="utf-8"))
            )
    assert named
    for place in sorted(named):
        file, _, anchor = place.partition("#")
        text = (
            (DOCS / file).read_text(encoding="utf-8")
            if (DOCS / file).is_file()
            else None
        )
        assert anchor in (AGREED if text is None else anchors(text)), place
