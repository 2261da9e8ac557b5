"""Settings that name a file or a folder (`field(metadata=PATH)`): those that the operating system refuses are
refused by name, before anything is done.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from conf.errors import UserError, in_one_line
from conf.schema import bare


def check_paths(config: Any) -> None:
    """Raise UserError for a path that no file can have, or that cannot be looked at.

    What is not there is no mistake yet: it may be made, or be a name on the hub.
    """
    for name, value in _paths(config):
        try:
            value.encode()
            os.stat(value)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(
                f"{name}={value}: must be a path that the system can open, got '{error.strerror}'. "
                "Give another path."
            ) from error
        except ValueError as error:  # a NUL byte, or half of a surrogate pair: a name that is no UTF-8
            raise UserError(
                f"{name}={value}: must be a path in UTF-8 without NUL bytes, got '{in_one_line(error)}'. "
                "Rename the file or folder."
            ) from error


def _paths(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every path of a dataclass of settings, by the name of its setting."""
    for field in fields(config):
        value = getattr(config, field.name)
        name = prefix.removesuffix(".") if bare(type(config)) == field.name else prefix + field.name
        if listed := field.metadata.get("path"):
            value = value if listed is True else getattr(config, listed)
            yield from ((name, path) for path in (value if isinstance(value, list) else [value]) if path)
        elif isinstance(value, Mapping):
            for key, member in value.items():
                if is_dataclass(member):
                    yield from _paths(member, f"{name}.{key}.")
        elif is_dataclass(value):
            yield from _paths(value, f"{name}.")
