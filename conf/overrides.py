"""The command line's text as Hydra's grammar takes it.

A prompt or a path is text, whatever brackets it has; a list needs none; settings by name may have any name.
"""

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from conf.choices import Group
from conf.errors import UserError
from conf.mistakes import unknown
from conf.schema import bare, by_name, names, optional, place

OUT = "out"  # the setting of a text in which ${NAME} is another setting's value


def unsigned(override: str) -> str:
    """Without Hydra's `+` and `++`: a setting is there already, and what is none must not be added."""
    return override.lstrip("+")


def check(overrides: Sequence[str], schema: type, groups: Sequence[Group]) -> None:
    """Raise UserError for what is no setting, for a choice that its group lacks, for a number in the place of
    true or false, and for `~name` of what must be there.
    """
    known = {group.name: group for group in groups}
    for override in overrides:
        name, equals, value = override.partition("=")
        if override.startswith(("-", "=")) or not (equals or override.startswith("~")):
            raise UserError(_unreadable(override, overrides, [*names(schema), *known]))
        if re.match(r"~?hydra\b", name):  # which has settings of its own, and none of them would do anything
            raise UserError(unknown(name, ()))
        if name.startswith("~"):
            _check_removable(name[1:], schema, known)
        elif name in known:
            if not is_default(override, groups):
                _check_choice(known[name], value)
        elif place(schema, name) is None:
            raise UserError(unknown(name, [*names(schema), *known]))
        elif kind_of(name, schema) is bool:
            _check_truth(name, value)


def _unreadable(override: str, overrides: Sequence[str], known: Collection[str]) -> str:
    """Say how a setting is written; of `--model X` or `--model=X`, in the user's own words."""
    name, equals, value = override.lstrip("-").replace("-", "_").partition("=")
    written = ""
    if override.startswith("-") and name in known:
        following = overrides[list(overrides).index(override) + 1 :][:1]
        given = override.partition("=")[2] if equals else "".join(following) or "VALUE"
        written = f" Write {name}={given}"
    return f"settings must be given as name=value, got '{override}'." + (
        written or " --help lists the settings"
    )


def _check_removable(name: str, schema: type, groups: Mapping[str, Group]) -> None:
    group = groups.get(name)
    if optional(schema, name) or (group and (group.several or not group.default)):
        return
    if group is None and place(schema, name) is None:
        raise UserError(unknown(name, [*names(schema), *groups]))
    raise UserError(f"{name} must be given as {name}=VALUE, got ~{name}, and it cannot be left out")


def _check_choice(group: Group, value: str) -> None:
    # No choice at all is one, where there may be several.
    chosen = re.findall(r"[^\s,\[\]]+", value) or ["none"]
    wrong = [choice for choice in chosen if choice not in group.names]
    if wrong and not (group.several and wrong in (["none"], ["null"])):
        valid = f"{'some' if group.several else 'one'} of {', '.join(group.names)}"
        raise UserError(f"{group.name} must be {valid}, got {wrong[0]}")


def _check_truth(name: str, value: str) -> None:
    """OmegaConf takes every number but 0 for true: `compile=8`."""
    with contextlib.suppress(ValueError):
        if int(value.strip("'\" ")) not in (0, 1):
            raise UserError(f"{name} must be true or false, got {value}")


def is_default(override: str, groups: Sequence[Group]) -> bool:
    """Whether it asks for no choice of a group that has none anyway: `decode=null`, which Hydra cannot read."""
    return any(override == f"{group.name}=null" and not (group.default or group.several) for group in groups)


def members(overrides: Sequence[str], schema: type) -> dict[str, dict[str, Any]]:
    """Return the entries given by name, of dicts of dataclasses: `prompts.mine.path=FILE` gives `mine`."""
    names_by_group: dict[str, dict[str, Any]] = {}
    for override in overrides:
        group, *names = override.partition("=")[0].split(".")
        if len(names) > 1 and by_name(get_type_hints(schema).get(group)):
            names_by_group.setdefault(group, {})[names[0]] = {}
    return names_by_group


def quoted(override: str, schema: type, groups: Sequence[Group]) -> str:
    """Return the override as Hydra's grammar takes it: the value of a text setting quoted, since a prompt or
    a path with brackets, commas or spaces would be read as something else; a bare value for nested
    settings given to that field of theirs which is marked for it; a list, or several choices of a group,
    in brackets; and what belongs to a library's own settings, a dict of Any, given whether the YAML has it
    already or not.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return override
    for group in groups:
        if group.name == key:  # also where the chosen YAML fills a library's own settings, as deepspeed's does
            return f"{key}={_bracketed(value)}" if group.several else override
    kind = kind_of(key, schema)
    if kind is Any or (get_origin(kind) is dict and get_args(kind)[1] is Any):
        return f"++{override}"
    if is_dataclass(kind) and (field := bare(kind)):
        key, kind = f"{key}.{field}", get_type_hints(kind)[field]
    types = types_of(kind)
    if str in types and (kind is str or value != "null"):
        return f"{key}={_as_text(value, resolved=key == OUT)}"
    if any(get_origin(kind) is list for kind in types) and not (value == "null" and NoneType in types):
        value = _bracketed(value)
    return f"{key}={value}"


def kind_of(key: str, schema: type) -> Any:
    """Return the type of a setting: Any for what lies in a library's own."""
    kind: Any = schema
    for name in key.split("."):
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
            if kind is Any:
                return Any
        elif is_dataclass(kind):
            kind = get_type_hints(kind).get(name)
    return kind


def types_of(kind: Any) -> list[Any]:
    """Return a type and, of a union, what it is of."""
    return [kind, *(get_args(kind) if get_origin(kind) in (Union, UnionType) else ())]


def _bracketed(value: str) -> str:
    """Return a list of Hydra's grammar, from one or from values with commas between them."""
    return value if value.startswith(("[", "$")) else f"[{'' if value == 'null' else value}]"


def _as_text(value: str, *, resolved: bool) -> str:
    """Return the value in quotes; `${objective.L}` in it is resolved only if `resolved`."""
    escaped = value if resolved else re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    escaped = re.sub(r"(\\*)'", r"\1\1\'", escaped)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"
