"""What a Markdown page shows and promises: blocks of code, command lines, links, anchors and tables. Pure."""

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
    """A program of ours as a page calls it: a module, or a script of launch/, and the words behind it."""

    program: str
    arguments: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        """The words that are settings, name=value."""
        return [
            word for word in self.arguments if "=" in word and not word.startswith("-")
        ]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page)


def commands(page: str) -> Iterator[Command]:
    """Every call of a program of ours: in blocks for a shell, in indented ones, and between backticks."""
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
    """`python -m MODULE ...`, `torchrun ... -m MODULE ...`, `bash launch/SCRIPT ...`; None for others."""
    for at, word in enumerate(words):
        if word == "-m" and at + 1 < len(words):
            return Command(words[at + 1], tuple(words[at + 2 :]))
        if re.fullmatch(r"launch/\w+\.sh", word) and words[0] not in ("cat", "less"):
            return Command(word, tuple(words[at + 1 :]))
    return None


def links(page: str) -> list[str]:
    """Where links and pictures point that stand outside of code."""
    return LINK.findall(SPAN.sub("", INDENTED.sub("", prose(page))))


def anchors(page: str) -> set[str]:
    """The anchors of a page as GitHub has them: of its headings, and those that are written out."""
    return {_slug(heading) for heading in HEADING.findall(prose(page))} | set(
        ANCHOR.findall(page)
    )


def _slug(heading: str) -> str:
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", bare).replace(" ", "-")
