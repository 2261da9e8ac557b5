"""Search the project's English for phrases that make a reader stumble.

    python -m tests.language [PATH ...]

The rules are those of CONTRIBUTING.md (Language) that a regular expression can check. The text is
the comments and strings of Python files, the comments and messages of YAML and shell files, and
the prose of pages. tests/test_language.py runs it over the whole tree. DEFENDED lists the phrases
that stay, each with its reason.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

#: Each rule and the phrases that break it.
RULES = {
    '"none" as a noun or a predicate': r"(?<!got )\bnone\b|\bNone (?:is|are|has|of)\b",
    '"of which", "whose" of a thing': r"\b(?:of|in|from|by|for|to|with|on) which\b|\bwhose\b",
    '"others", "those" without a noun': r"\bothers\b|\b[Tt]hose(?: that| of| in| with|[.,;:])",
    '"behind" for "after"': r"\bbehind\b",
    "text or a file that stands or lies": r"\b(?:stands?|stood|lies?|lay|lain)\b(?! for\b)",
    '"so many" without "that"': r"\bso (?:many|much|few)\b",
    'a clause that begins with "what"': r"(?:^|[.;:,(] ?|\b(?:and|but|or) )[Ww]hat\b(?![^.;]*\?)",
    '"nobody", "nothing", "whoever" as a subject': r"\b(?:[Nn]obody|[Ww]hoever|[Nn]othing (?:is|that|of))\b",
    '"wanted", "found" in a message': r"\bwanted\b|\bfound (?:none|instead)\b",
    '"ours", "theirs"': r"\b(?:ours|theirs)\b",
    "archaic words": r"\b(?:[Oo]f late|thus|hence|thereof|therein|wherein|whereof|[Bb]e it)\b",
}
# From Python 3.12 an f-string is several tokens between these two.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)
#: Files with such phrases as data.
OWN_FILES = ("tests/language.py", "tests/test_language.py")
#: (path, phrase): the reason why it stays.
DEFENDED: dict[tuple[str, str], str] = {}


class Hit(NamedTuple):
    path: str
    #: of the comment's or the string's first line
    line: int
    rule: str
    phrase: str
    context: str


def python_text(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment and each string of several words."""
    lines = source.splitlines(keepends=True)
    begins: list[tuple[int, int]] = []  # of the f-strings around a token
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = ""
        if token.type == FSTRING_START:
            begins.append(token.start)
        elif token.type == FSTRING_END:
            line, column = begins.pop()
            rows = lines[line - 1 : token.end[0]]
            rows[-1] = rows[-1][: token.end[1]]
            text = "" if begins else "".join(rows)[column:]
        elif token.type in (tokenize.COMMENT, tokenize.STRING) and not begins:
            (line, _), text = token.start, token.string
        if re.search(r"[a-z] [a-z]", text):
            yield line, text


def page_text(source: str) -> Iterator[tuple[int, str]]:
    """Yield each line outside code, without code spans and link targets."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "``", line)


def script_text(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and the printed messages of a shell or YAML file."""
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r'(?:^|\s)#+ (.*)|echo "([^"]*)"', line):
            yield number, match[1] or match[2] or ""


READERS: dict[str, Callable[[str], Iterator[tuple[int, str]]]] = {
    ".py": python_text,
    ".md": page_text,
    ".sh": script_text,
    ".yaml": script_text,
}


def hits(path: Path) -> Iterator[Hit]:
    """Yield the phrases of a file that break a rule and are not defended."""
    name = path.relative_to(ROOT).as_posix()
    for line, text in READERS[path.suffix](path.read_text(encoding="utf-8")):
        words = re.sub(r"\s+", " ", text)
        for rule, pattern in RULES.items():
            for match in re.finditer(pattern, words):
                if (name, match[0]) not in DEFENDED:
                    context = words[max(0, match.start() - 50) : match.end() + 30]
                    yield Hit(name, line, rule, match[0], context)


def sources() -> list[Path]:
    """Return the tree's files that have text, except this file and its test."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [Path(name) for name in listed.stdout.splitlines()]
    return [
        ROOT / name
        for name in names
        if name.suffix in READERS and name.as_posix() not in OWN_FILES
    ]


if __name__ == "__main__":
    paths = [Path(name).resolve() for name in sys.argv[1:]] or sources()
    found = [hit for path in paths for hit in hits(path)]
    for hit in found:
        print(f"{hit.path}:{hit.line}: {hit.rule}: {hit.context}")
    print(f"{len(found)} hits in {len(paths)} files")
