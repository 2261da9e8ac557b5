"""What a stage's YAML holds beside values: groups, what their choices are for, and examples of the command.

The comment at the head of a choice says what it is for, in a sentence on its first line and more below. That of
config.yaml has the command, and below it examples of it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

FOLDER = Path(__file__).parent
PACKAGE = "@package"  # Hydra's: where a choice's values go


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


@dataclass(frozen=True)
class Command:
    """How a stage is called."""

    words: str
    examples: tuple[str, ...]


def command(entry: str) -> Command:
    """As the head of its config.yaml has it."""
    words, *examples = _head((FOLDER / entry / "config.yaml").read_text(encoding="utf-8"))
    return Command(words, tuple(examples))


def groups(entry: str) -> list[Group]:
    """All groups of a stage, with their choices in the order of their names."""
    text = (FOLDER / entry / "config.yaml").read_text(encoding="utf-8")
    config: Any = OmegaConf.to_container(OmegaConf.create(text))
    chosen = {
        name: value for item in config["defaults"] if isinstance(item, dict) for name, value in item.items()
    }
    folders = [path for path in sorted((FOLDER / entry).iterdir()) if path.is_dir()]
    return [_group(path, chosen.get(path.name), text) for path in folders]


def _group(folder: Path, default: Any, config: str) -> Group:
    several = isinstance(default, list)
    otherwise = re.search(rf"^ *- {folder.name}: null +# (.+)$", config, re.MULTILINE)
    return Group(
        name=folder.name,
        several=several,
        default=tuple(default) if several else (default,) if default else (),
        otherwise=otherwise[1] if otherwise else "",
        choices=tuple(
            Choice(path.stem, tuple(_head(path.read_text(encoding="utf-8"))))
            for path in sorted(folder.glob("*.yaml"))
        ),
    )


def _head(text: str) -> list[str]:
    """Return the comment that a file begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return [line for line in lines if not line.startswith(PACKAGE)]
