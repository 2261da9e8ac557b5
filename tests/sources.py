"""Read the strings and names of source files, to compare documents with them.

A string becomes a list of tokens: its words, HOLE for a formatted value, and BREAK for a
number, a setting, a parenthesis or the end of a sentence. A quoted message is split at its
BREAKs into runs of words, and each run must occur in one string of the sources.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

HOLE = "\0"
BREAK = "\1"
FILLED = 4  # most words of a formatted value
WORD = re.compile(r"a|[A-Za-z]{2,}(?:['-][A-Za-z]+)*")
KEY = re.compile(r"[\w.+/-]+")
FIELD = re.compile(r"\{[^{}]*\}")  # a field of str.format
SHELL = re.compile(r'"((?:[^"\\]|\\.)*)"')
VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\}|\([^)]*\))")


def tokens(text: str) -> list[str]:
    """Return the words of a text, HOLE and BREAK; a placeholder (`...`, DIR, 3) is a BREAK."""
    result = []
    for part in text.replace("(", f" {BREAK} ").replace(")", f" {BREAK} ").split():
        word = part.strip(",.:;!?()[]'\"≠→")
        if HOLE in part:
            result.append(HOLE)
        elif WORD.fullmatch(word) and not (len(word) > 1 and word.isupper()):
            result.append(word.lower())
        else:
            result.append(BREAK)
        if part[-1] in ".:;?!" or "..." in part:
            result.append(BREAK)
    return result


def runs(message: str) -> list[list[str]]:
    """Return the runs of two or more words of a quoted message."""
    parts = groupby(tokens(message), BREAK.__ne__)
    words = [list(run) for is_run, run in parts if is_run]
    return [run for run in words if len(run) > 1]


def strings(source: str) -> Iterator[str]:
    """Yield the strings of a Python file except docstrings, with HOLE for each formatted value."""
    tree = ast.parse(source)
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped.update(
                part for part in node.values if isinstance(part, ast.Constant)
            )
            yield "".join(
                part.value if isinstance(part, ast.Constant) else HOLE
                for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in skipped
        ):
            yield FIELD.sub(HOLE, node.value)


def shell_strings(source: str) -> Iterator[str]:
    """Yield the double-quoted texts of a shell script, with HOLE for each variable."""
    for text in SHELL.findall(source):
        yield VARIABLE.sub(HOLE, text)


def occurs(run: list[str], templates: list[list[str]]) -> bool:
    """Return whether a run of words occurs in one of the tokenized strings.

    HOLEs may match at most half of the words; in a run of two all words must occur.
    """
    most = len(run) // 2 if len(run) > 2 else 0
    return any(
        _begins(template[start:], run, most)
        for template in templates
        for start, token in enumerate(template)
        if token in (HOLE, run[0])
    )


def _begins(template: list[str], run: list[str], holes: int) -> bool:
    """Return whether the template starts with the run; its HOLEs may match `holes` words."""
    if not run:
        return True
    if not template:
        return False
    if template[0] == HOLE:
        most = min(FILLED, holes, len(run))
        return any(
            _begins(template[1:], run[filled:], holes - filled)
            for filled in range(most + 1)
        )
    return template[0] == run[0] and _begins(template[1:], run[1:], holes)


def prose(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def names(path: Path) -> set[str]:
    """Return the names in a Python file: of definitions, arguments, attributes, imports and keys."""
    result = {*path.with_suffix("").parts, path.name}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            result.add(node.name)
        elif isinstance(node, ast.Name):
            result.add(node.id)
        elif isinstance(node, ast.Attribute):
            result.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            result.add(node.arg)
        elif isinstance(node, ast.alias):
            result.update(node.name.split("."))
        elif isinstance(node, ast.Constant) and KEY.fullmatch(str(node.value)):
            result.add(str(node.value))
    return result
