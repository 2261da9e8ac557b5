"""What a stage's YAML holds beside values: groups, what their choices are for, and examples of the command.

The comment at the head of a choice says what it is for, in a sentence on its first line and more below. That of
config.yaml has the command, and below it examples of it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Choice:
    """One file of a group: `lines` are its comment."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Files of settings, of which one is chosen by name, or several.

    `default` are the names chosen where nothing is said; `otherwise` says what happens where these are none.
    """

    name: str
    several: bool
    default: tuple[str, ...]
    otherwise: str
    choices: tuple[Choice, ...]

    @property
    def names(self) -> list[str]:
        """Of its choices."""
        return [choice.name for choice in self.choices]


def command(entry: str) -> tuple[str, ...]:
    """Return how a stage is called, and examples, as the head of its config.yaml has them."""
    return _head(FOLDER / entry / "config.yaml")


def groups(entry: str) -> list[Group]:
    """Return all groups of a stage, with their choices in the order of their names."""
    text = (FOLDER / entry / "config.yaml").read_text(encoding="utf-8")
    defaults: dict[str, Any] = {}
    for item in yaml.safe_load(text)["defaults"]:
        defaults |= item if isinstance(item, dict) else {}
    groups = []
    for folder in sorted(path for path in (FOLDER / entry).iterdir() if path.is_dir()):
        default: Any = defaults.get(folder.name)
        several = isinstance(default, list)
        otherwise = re.search(rf"^ *- {folder.name}: null +# (.+)$", text, re.MULTILINE)
        groups.append(
            Group(
                name=folder.name,
                several=several,
                default=tuple(default) if several else (default,) if default else (),
                otherwise=otherwise[1] if otherwise else "",
                choices=tuple(Choice(path.stem, _head(path)) for path in sorted(folder.glob("*.yaml"))),
            )
        )
    return groups


def _head(path: Path) -> tuple[str, ...]:
    """Return the comment that a file begins with, without Hydra's `@package`."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    lines = [line.removeprefix("#").strip() for line in comment[0].splitlines()] if comment else []
    return tuple(line for line in lines if not line.startswith("@package"))
