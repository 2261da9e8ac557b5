"""--help, and what docs/settings is made of: every setting of a stage with its type, default and meaning.

What a setting means is the comment at its field in the dataclass, on the lines directly above it and at the end
of its own; its default is that of the composed YAML.
"""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from conf.compose import Group, command, composed, config_groups
from conf.errors import DOCS
from conf.schema import bare, fields_of, named_setting, types_of

WORDS = {
    str: ("text", "texts"),
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    bool: ("true or false", "true or false"),
    Any: ("value", "values"),
}
REQUIRED = "???"  # OmegaConf's
GROUPS = (
    "files of settings, chosen by name; a setting on the command line goes over theirs"
)
END = (
    "--cfg prints the settings as they would be, and stops. -m runs every combination of values with commas, "
    "one after the other. More is in {page}."
)


@dataclass(frozen=True)
class Setting:
    """One setting. `default` is as it would be written, None where the setting is required."""

    name: str
    kind: str
    default: str | None
    description: str


@dataclass(frozen=True)
class Section:
    """The settings of a nested dataclass, and what is said at its field, else what it says of itself.

    Those of no such dataclass have an empty name.
    """

    name: str
    text: str
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Entry:
    """A stage, as its help and its page of the reference tell of it."""

    name: str
    title: str
    command: str
    examples: tuple[str, ...]
    groups: tuple[Group, ...]
    sections: tuple[Section, ...]


def describe(entry: str, schema: type) -> Entry:
    """Describe the stage whose settings are `conf/<entry>` and the dataclass `schema`."""
    defaults = composed(entry, schema)
    (words, *examples) = command(entry)
    choices = {
        group.name: f"{group.name}={','.join(group.default)}"
        for group in config_groups(entry)
    }
    sections: dict[str, tuple[type, list[Setting]]] = {"": (schema, [])}
    for name, owner, field, kind in fields_of(schema):
        group = name.partition(".")[0]
        value = _default(defaults, name, owner, field)
        meaning = comments(owner).get(field, "")
        if isinstance(value, Mapping) and value:
            default: str | None = "{...}"
            meaning += f"; by default those of {choices[group]}"
        else:
            default = None if value == REQUIRED else written(value)
        section = sections.setdefault("" if owner is schema else group, (owner, []))
        section[1].append(Setting(name, in_words(kind), default, meaning))
    return Entry(
        name=entry,
        title=paragraph(schema).removeprefix(f"{words}: "),
        command=words,
        examples=tuple(examples),
        groups=tuple(config_groups(entry)),
        sections=tuple(
            Section(
                name,
                (comments(schema).get(name) or paragraph(owner)) if name else "",
                tuple(members),
            )
            for name, (owner, members) in sections.items()
        ),
    )


def _default(defaults: Mapping[str, Any], name: str, owner: type, field: str) -> Any:
    value: Any = defaults
    for part in name.split("."):
        value = value[part]
    return value[field] if bare(owner) == field else value


def comments(schema: type) -> dict[str, str]:
    """Return the comments at the fields of a dataclass, and of those it inherits from."""
    by_field: dict[str, str] = {}
    for owner in filter(is_dataclass, reversed(schema.__mro__)):
        source = textwrap.dedent(inspect.getsource(owner))
        lines = source.splitlines()
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts = {
            t.start[0]: t.string.lstrip("#").strip()
            for t in tokens
            if t.type == tokenize.COMMENT
        }
        (tree,) = ast.parse(source).body
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words = [texts.get(node.end_lineno or node.lineno, "")]
                row = node.lineno - 1
                while lines[row - 1].lstrip().startswith("#"):
                    words.insert(0, texts[row])
                    row -= 1
                by_field[node.target.id] = " ".join(filter(None, words))
    return by_field


def paragraph(schema: type) -> str:
    """Return the first paragraph of the docstring, on one line: the rest is for those who write code."""
    return " ".join(inspect.cleandoc(schema.__doc__ or "").partition("\n\n")[0].split())


def in_words(kind: Any, *, several: bool = False) -> str:
    """Return a type as a user would say it; that it may be null, its default or its description says."""
    if len(types := types_of(kind)) > 1:
        return " or ".join(in_words(hint) for hint in types[1:] if hint is not NoneType)
    if get_origin(kind) is list:
        return f"list of {in_words(get_args(kind)[0], several=True)}"
    return "settings by name" if get_origin(kind) is dict else WORDS[kind][several]


def written(value: Any) -> str:
    """Return a value as the command line and YAML have it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return '""' if value == "" else str(value)  # an empty mapping is {} in both


def settings_page(entry: str) -> str:
    """Return the reference of a stage's settings, as a path from the project's root."""
    return f"{DOCS}/settings/{entry}.md"


def link(sentence: str, page: str | None, entry: str, schema: type) -> str | None:
    """Return where `sentence` is explained: at `page` of docs/, else at the setting that it names."""
    if page:
        return f"{DOCS}/{page}"
    if setting := named_setting(
        sentence, schema, [group.name for group in config_groups(entry)]
    ):
        return f"{settings_page(entry)}#{setting}"
    return settings_page(entry) if "--help" in sentence else None


def print_help(entry: Entry, console: Console) -> None:
    """Print how a stage is called, its groups and its settings, at the terminal's width."""
    console.print(entry.title[:1].upper() + entry.title[1:], "\n")
    console.print(Text.assemble(("Usage: ", "bold"), f"{entry.command} NAME=VALUE ..."))
    for example in entry.examples:
        console.print(f"  {example}", soft_wrap=True)  # whole, to be copied
    rows = [row for group in entry.groups for row in _group_rows(group)]
    if rows:
        _print_section(console, "Groups", GROUPS, rows)
    for section in entry.sections:
        if section.settings:
            settings = [
                (f"{s.name}=", s.default or "", _meaning(s)) for s in section.settings
            ]
            _print_section(console, section.name or "Settings", section.text, settings)
    console.print()
    console.print(END.format(page=settings_page(entry.name)))


def _group_rows(group: Group) -> Iterator[tuple[str, str, str]]:
    if group.several:
        yield f"{group.name}=", "A,B,...", "one or several of these:"
    for choice in group.choices:
        mark = "(default) " if choice.name in group.default else ""
        yield f"{group.name}=", choice.name, mark + " ".join(choice.lines[:1])
    if group.otherwise:
        yield f"{group.name}=", "null", f"(default) {group.otherwise}"


def _meaning(setting: Setting) -> str:
    if setting.default is None:
        return f"(required) {setting.description}"
    # The default of others shows what they are.
    return (
        f"{setting.description} ({setting.kind})"
        if setting.default == "null"
        else setting.description
    )


def _print_section(
    console: Console, name: str, text: str, rows: list[tuple[str, str, str]]
) -> None:
    console.print()
    console.print(Text.assemble((name, "bold"), f": {text}" if text else ""))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=console.width // 2, overflow="fold")
    table.add_column()
    for setting, value, meaning in rows:
        table.add_row(Text.assemble((setting, "cyan"), (value, "green")), meaning)
    console.print(Padding(table, (0, 0, 0, 2)))
