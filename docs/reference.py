"""Writes docs/settings: a page for every stage, of its groups and its settings, with an anchor for each.

    python -m docs.reference

What is said there stands as comments in the dataclasses and in conf/*/*.yaml: change it there.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from conf.compose import Group
from conf.help import Entry, Section, Setting, describe
from data_prep.config import DataPrepConfig
from data_prep.inspect import InspectConfig
from infer.bench.config import BenchConfig
from infer.config import InferConfig
from infer.playground import PlaygroundConfig
from infer.regenerate import RegenerateConfig
from train.config import TrainConfig
from train.export import ExportConfig

ENTRIES: dict[str, type] = {
    "data_prep": DataPrepConfig,
    "inspect": InspectConfig,
    "train": TrainConfig,
    "export": ExportConfig,
    "infer": InferConfig,
    "bench": BenchConfig,
    "playground": PlaygroundConfig,
    "regenerate": RegenerateConfig,
}
FOLDER = Path(__file__).parent / "settings"


def page(entry: Entry) -> str:
    """Return a stage's page, in Markdown that GitHub and MyST read alike."""
    return "\n".join(_lines(entry)).rstrip() + "\n"


def _lines(entry: Entry) -> Iterator[str]:
    yield f"# `{entry.command}`"
    yield ""
    yield "<!-- Written by python -m docs.reference, from comments in conf/ and in the dataclasses. -->"
    yield ""
    yield _text(entry.title[:1].upper() + entry.title[1:])
    yield ""
    yield "```bash"
    yield from entry.examples
    yield "```"
    yield ""
    if entry.groups:
        yield "## Groups"
        yield ""
        yield "A choice sets several settings at once; a setting on the command line goes over it."
        yield ""
    sections = [section for section in entry.sections if section.settings]
    # A group leads to the settings of its name where there are some.
    named = {
        name
        for section in sections
        for name in (section.name, *(item.name for item in section.settings))
    }
    for group in entry.groups:
        yield from _group(group, anchored=group.name not in named)
    yield "## Settings"
    yield ""
    for section in sections:
        yield from _section(section)


def _group(group: Group, *, anchored: bool) -> Iterator[str]:
    of = "NAME,NAME`**, one or several of" if group.several else "NAME`**, one of"
    otherwise = (
        f" (where none is given, {_text(group.otherwise)})" if group.otherwise else ""
    )
    yield f"{_anchor(group.name) if anchored else ''}**`{group.name}={of} these{otherwise}:"
    yield ""
    yield "| choice | what it is for |"
    yield "|---|---|"
    for choice in group.choices:
        default = " (default)" if choice.name in group.default else ""
        yield f"| `{group.name}={choice.name}`{default} | {_text(' '.join(choice.lines))} |"
    yield ""


def _section(section: Section) -> Iterator[str]:
    if section.name:
        yield f"### {section.name}"
        yield ""
        yield _text(section.text)
        yield ""
    yield "| setting | default | kind | what it says |"
    yield "|---|---|---|---|"
    for setting in section.settings:
        yield _row(setting, anchored=setting.name != section.name)
    yield ""


def _row(setting: Setting, *, anchored: bool) -> str:
    default = (
        "required"
        if setting.default is None
        else f"`{setting.default}`".replace("|", r"\|")
    )
    name = f"{_anchor(setting.name) if anchored else ''}`{setting.name}`"
    return f"| {name} | {default} | {setting.kind} | {_text(setting.description)} |"


def _anchor(name: str) -> str:
    return f'<a id="{name}"></a>'


def _text(said: str) -> str:
    """Plain text as Markdown: marks of its own escaped, but for code between backticks."""
    plain, code = r"([*<\[\]|])", r"([|])"
    parts = [
        re.sub(code if index % 2 else plain, r"\\\1", part)
        for index, part in enumerate(said.split("`"))
    ]
    return "`".join(parts)


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in ENTRIES.items():
        (FOLDER / f"{name}.md").write_text(
            page(describe(name, schema)), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
