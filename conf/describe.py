"""Every setting of a stage: name, type, default and what it means, for --help and for docs/settings alike.

What a setting means is the comment at its field in the dataclass; its default is that of the composed YAML.
Knows neither terminals nor pages.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from conf.choices import Command, Group, command, groups
from conf.comments import comments, paragraph
from conf.compose import composed
from conf.schema import NAME, bare, fields_of

WORDS = {
    str: ("text", "texts"),
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    bool: ("true or false", "true or false"),
    Any: ("value", "values"),
}
REQUIRED = "???"  # OmegaConf's


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
    command: Command
    groups: tuple[Group, ...]
    sections: tuple[Section, ...]


def describe(entry: str, schema: type) -> Entry:
    """Return the stage whose settings are `conf/<entry>` and the dataclass `schema`."""
    chosen, called = groups(entry), command(entry)
    return Entry(
        name=entry,
        title=paragraph(schema).removeprefix(f"{called.words}: "),
        command=called,
        groups=tuple(chosen),
        sections=tuple(_sections(schema, composed(entry, schema), chosen)),
    )


def _sections(schema: type, defaults: Mapping[str, Any], chosen: Iterable[Group]) -> Iterable[Section]:
    choices = {group.name: f"{group.name}={','.join(group.default)}" for group in chosen}
    owners: dict[str, type] = {"": schema}
    settings: dict[str, list[Setting]] = {"": []}
    for name, owner, field, kind in fields_of(schema):
        group = name.partition(".")[0]
        section = "" if owner is schema else group
        value, said = _default(defaults, name, owner, field), comments(owner).get(field, "")
        if isinstance(value, Mapping) and value:
            text: str | None = "{...}"
            said += f"; by default those of {choices[group]}"
        else:
            text = None if value == REQUIRED else written(value)
        owners[section] = owner
        settings.setdefault(section, []).append(Setting(name, in_words(kind), text, said))
    for section, owner in owners.items():
        text = comments(schema).get(section) or paragraph(owner) if section else ""
        yield Section(section, text, tuple(settings[section]))


def _default(defaults: Mapping[str, Any], name: str, owner: type, field: str) -> Any:
    if f".{NAME}." in name:  # no YAML has a setting of any name
        (own,) = (item for item in fields(owner) if item.name == field)
        return own.default if own.default_factory is MISSING else own.default_factory()
    value: Any = defaults
    for part in name.split("."):
        value = value[part]
    return value[field] if bare(owner) == field else value


def in_words(kind: Any, *, several: bool = False) -> str:
    """Return a type as a user would say it; that it may be null, its default or its description says."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(in_words(item) for item in get_args(kind) if item is not NoneType)
    if get_origin(kind) is list:
        return f"list of {in_words(get_args(kind)[0], several=True)}"
    if get_origin(kind) is dict:
        return "settings by name"
    return WORDS[kind][several]


def written(value: Any) -> str:
    """Return a value as the command line and YAML have it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return '""' if value == "" else str(value)  # an empty mapping is {} in both
