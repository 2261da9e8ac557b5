"""Read a Markdown page: prose, blocks of code, commands, links and anchors."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*\n)", re.MULTILINE)
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)
ANCHOR = re.compile(r'\bid="([^"]+)"')
CALL = re.compile(r"-m (conf|data_prep|train|infer|tests)\b|launch/\w+\.sh")
SEPARATORS = ("&&", "&", "|", ";")


@dataclass(frozen=True)
class Command:
    """A call of this project in a page: a module or a script of launch/, and its arguments."""

    program: str
    arguments: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        """The arguments that are settings, name=value."""
        return [
            word for word in self.arguments if "=" in word and not word.startswith("-")
        ]


def prose(page: str) -> str:
    """Return the page without its fenced blocks."""
    return FENCE.sub("", page)


def commands(page: str) -> Iterator[Command]:
    """Yield all calls of this project: in shell blocks, indented blocks and code spans."""
    bare = prose(page)
    blocks = FENCE.findall(page)
    texts = [text for language, text in blocks if language == "bash"]
    texts += [
        typed
        for language, text in blocks
        if language == "console"
        for typed in TYPED.findall(text)
    ]
    texts += [*INDENTED.findall(bare), *SPAN.findall(INDENTED.sub("", bare))]
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        if not CALL.search(line):
            continue
        words = shlex.split(line, comments=True)
        for separates, part in groupby(words, SEPARATORS.__contains__):
            command = None if separates else _command(list(part))
            if command is not None:
                yield command


def _command(words: list[str]) -> Command | None:
    """Parse `python -m MODULE ...`, `torchrun ... -m MODULE ...` or `bash launch/SCRIPT ...`.

    Return None for any other command.
    """
    for index, word in enumerate(words):
        if word == "-m" and index + 1 < len(words):
            return Command(words[index + 1], tuple(words[index + 2 :]))
        if re.fullmatch(r"launch/\w+\.sh", word) and words[0] not in ("cat", "less"):
            return Command(word, tuple(words[index + 1 :]))
    return None


def links(page: str) -> list[str]:
    """Return the targets of links and pictures outside of code."""
    return LINK.findall(SPAN.sub("", INDENTED.sub("", prose(page))))


def anchors(page: str) -> set[str]:
    """Return the anchors of a page on GitHub: of its headings, and of `id` attributes."""
    return {_slug(heading) for heading in HEADING.findall(prose(page))} | set(
        ANCHOR.findall(page)
    )


def _slug(heading: str) -> str:
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", bare).replace(" ", "-")
