"""Names say what they hold: a participle or a pronoun is no name (CONTRIBUTING.md, style)."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILLERS = {"found", "told", "one", "some", "kept", "made", "asked", "taken", "shown", "wanted"}
PRODUCT = ("conf", "data_prep", "train", "infer")


def names(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def test_no_name_is_a_filler() -> None:
    fillers = {}
    for package in (*PRODUCT, "docs", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if bad := names(ast.parse(path.read_text())) & FILLERS:
                fillers[name] = bad
    assert not fillers


def test_errors_say_must_be_and_got() -> None:
    """'X: wanted A, found B' became 'X must be A, got B'."""
    old = [
        path.relative_to(ROOT).as_posix()
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if any(": wanted " in line and '"' in line for line in path.read_text().splitlines())
    ]
    assert not old


def test_prose_is_plain() -> None:
    """No sentence of the product says "told" or "wanted": errors are reported, values expected."""
    lines_of = {
        path.relative_to(ROOT).as_posix(): lines
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if (
            lines := [
                line.strip()
                for line in path.read_text().splitlines()
                if re.search(r"\b(told|wanted)\b", line) and not re.search(r"[\"'](told|wanted)[\"']", line)
            ]
        )
    }
    assert not lines_of
