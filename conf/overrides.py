"""The command line's text as Hydra's grammar takes it.

A prompt or a path is text, whatever brackets it has; a list needs none; settings by name may have any name.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from conf.choices import Group
from conf.errors import UserError
from conf.schema import bare, by_name


def check(overrides: Sequence[str], groups: Sequence[Group]) -> None:
    """Raises UserError for what is no setting, and for a choice that its group lacks."""
    known = {group.name: group for group in groups}
    for override in overrides:
        name, equals, value = override.partition("=")
        if override.startswith(("-", "=")) or not (equals or override.startswith("~")):
            raise UserError(f"settings are given as name=value, and --help lists them: found '{override}'")
        if name not in known or is_default(override, groups):
            continue
        group = known[name]
        # No choice at all is one, where there may be several.
        chosen = re.findall(r"[^\s,\[\]]+", value) or ["none"]
        wrong = [choice for choice in chosen if choice not in group.names]
        if wrong and not (group.several and wrong in (["none"], ["null"])):
            wanted = f"wanted {'some' if group.several else 'one'} of {', '.join(group.names)}"
            raise UserError(f"{name}: {wanted}, found {wrong[0]}")


def is_default(override: str, groups: Sequence[Group]) -> bool:
    """Whether it asks for no choice of a group that has none anyway: `decode=null`, which Hydra cannot read."""
    return any(override == f"{group.name}=null" and not (group.default or group.several) for group in groups)


def members(overrides: Sequence[str], schema: type) -> dict[str, dict[str, Any]]:
    """The names given to settings by name, a dict of dataclasses: `prompts.mine.path=FILE` gives `mine`."""
    found: dict[str, dict[str, Any]] = {}
    for override in overrides:
        group, *names = override.partition("=")[0].split(".")
        if len(names) > 1 and by_name(get_type_hints(schema).get(group)):
            found.setdefault(group, {})[names[0]] = {}
    return found


def quoted(override: str, schema: type, several: Collection[str] = ()) -> str:
    """The override as Hydra's grammar takes it: the value of a text setting quoted, since a prompt or
    a path with brackets, commas or spaces would be read as something else; a bare value for nested
    settings given to that field of theirs which is marked for it; a list, or several choices of a group,
    in brackets; and what belongs to a library's own settings, a dict of Any, given whether the YAML has it
    already or not.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return override
    if key in several:
        return f"{key}={_bracketed(value)}"
    kind: Any = schema
    for name in key.split("."):
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
            if kind is Any:
                return f"++{override}"
        elif is_dataclass(kind):
            kind = get_type_hints(kind).get(name)
    if is_dataclass(kind) and (field := bare(kind)):
        key, kind = f"{key}.{field}", get_type_hints(kind)[field]
    types = [kind, *(get_args(kind) if get_origin(kind) in (Union, UnionType) else ())]
    if str in types and (kind is str or value != "null"):
        return f"{key}={_as_text(value)}"
    if any(get_origin(one) is list for one in types) and not (value == "null" and NoneType in types):
        value = _bracketed(value)
    return f"{key}={value}"


def _bracketed(value: str) -> str:
    """A list of Hydra's grammar, from one or from values with commas between them."""
    return value if value.startswith(("[", "$")) else f"[{'' if value == 'null' else value}]"


def _as_text(value: str) -> str:
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    escaped = re.sub(r"(\\*)'", r"\1\1\'", escaped)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"
