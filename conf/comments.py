"""The comments at the fields of a dataclass, and the first paragraph of its docstring. Knows no values."""

import ast
import inspect
import io
import textwrap
import tokenize
from dataclasses import is_dataclass


def comments(schema: type) -> dict[str, str]:
    """Return what is said at each field: on the lines directly above it, and at the end of its own."""
    texts: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        if is_dataclass(owner):
            texts |= _own(owner)
    return texts


def paragraph(schema: type) -> str:
    """Return the first of the docstring, on one line: what follows it is for those who write code."""
    return " ".join(inspect.cleandoc(schema.__doc__ or "").partition("\n\n")[0].split())


def _own(schema: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(schema))
    lines = source.splitlines()
    said: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            place = said if lines[row - 1][:column].strip() else alone
            place[row] = token.string.lstrip("#").strip()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            row, words = node.lineno - 1, [said.get(node.end_lineno or node.lineno, "")]
            while row in alone:
                words.insert(0, alone[row])
                row -= 1
            texts[node.target.id] = " ".join(word for word in words if word)
    return texts
