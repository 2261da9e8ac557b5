"""What a stage's dataclass holds: the names and types of its settings. Pure.

A nested dataclass makes names with a dot. A dict of dataclasses holds settings by name, NAME standing for it:
`prompts.NAME.path`. A dict of anything is a library's own: what lies in it has any name. A field of metadata
`bare` is what a bare value of its dataclass is for: `draft=DIR` is `draft.model=DIR`.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

NAME = "NAME"


def by_name(kind: Any) -> Any:
    """Return the dataclass of settings by name; None for others."""
    return get_args(kind)[1] if get_origin(kind) is dict and is_dataclass(get_args(kind)[1]) else None


def bare(schema: Any) -> str | None:
    """Return the field that a bare value is for: that of metadata `bare`."""
    return next((field.name for field in fields(schema) if field.metadata.get("bare")), None)


def fields_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Every setting: its name, the dataclass and field that it is in, and its type."""
    for field, kind in zip(fields(schema), _kinds(schema).values()):
        name = prefix + field.name
        if member := by_name(kind):
            yield from fields_of(member, f"{name}.{NAME}.")
        elif is_dataclass(kind):
            yield from fields_of(kind, f"{name}.")
        else:
            yield prefix.removesuffix(".") if field.metadata.get("bare") else name, schema, field.name, kind


def names(schema: Any) -> list[str]:
    """Of all settings."""
    return [name for name, *_ in fields_of(schema)]


def place(schema: Any, name: str) -> str | None:
    """Return the setting, or the group of them, that a name within an error means; None where it is none.

    `prompts.mine.path` and `prompts.path` are `prompts.NAME.path`; what lies in a library's own settings is
    where these are.
    """
    kind, path = schema, list[str]()
    for part in name.split("."):
        if member := by_name(kind):
            path.append(NAME)
            kind = member
            if part not in _kinds(kind):
                continue
        if get_origin(kind) is dict:
            break
        if not is_dataclass(kind) or part not in (kinds := _kinds(kind)):
            return None
        if part == bare(kind):
            break
        path.append(part)
        kind = kinds[part]
    return ".".join(path).removesuffix(f".{NAME}")


def optional(schema: Any, name: str) -> bool:
    """Whether a name is one of settings by name, or lies in a library's own: these may be left out."""
    kind, inside = schema, False
    for part in name.split("."):
        inside = get_origin(kind) is dict
        if inside:
            kind = get_args(kind)[1]
            if not is_dataclass(kind):
                return True
        elif is_dataclass(kind) and part in (kinds := _kinds(kind)):
            kind = kinds[part]
        else:
            return False
    return inside


def _kinds(schema: Any) -> dict[str, Any]:
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in fields(schema)}
