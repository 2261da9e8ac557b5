"""Expand a leading `~` in settings that are paths.

Shells expand `~` only at the start of a word: not in `out=~/runs` (zsh, dash) or `data.path=~/code` (bash).
"""

import os
from dataclasses import fields, is_dataclass
from typing import Any

from conf.errors import UserError


def expand_home(config: Any, group: str = "") -> None:
    """Expand `~` and `~user` in the path settings of a dataclass, in place.

    Raises UserError, naming the setting, for a home folder that does not exist on this system.
    """
    for field in fields(config):
        name = group + field.name
        value = getattr(config, field.name)
        if is_dataclass(value):
            expand_home(value, f"{name}.")
        elif "path" in field.metadata:
            setattr(config, field.name, _expanded(value, name))


def _expanded(value: Any, name: str) -> Any:
    """Return a path or a list of paths with `~` expanded; return any other value unchanged."""
    if isinstance(value, list):
        return [_expanded(item, f"{name}[{at}]") for at, item in enumerate(value)]
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    path = os.path.expanduser(value)
    # An existing file with such a name is meant; editors write ~lock.txt, for example.
    if path == value and (value.partition("/")[0] == "~" or not os.path.lexists(value)):
        raise UserError(
            f"{name} must be a path, got {value}: this system has no such home folder. Give the whole path, or "
            f"./{value} for a file of that name."
        )
    return path
