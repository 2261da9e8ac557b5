"""Extract the program from a chat model's answer, by EvalPlus's rule (its sanitize.py). Pure.

1. Take the longest run of lines that parses as Python, counted in lines with text, or the first
   of equally long runs. This leaves out prose, fences and a function that was cut off.
2. Take its imports, then its definitions in their order: classes, functions with a return
   statement, assignments to a name. Of two definitions of a name take the first. Leave out
   decorated definitions, other statements, and definitions that the entry point does not reach
   by names. Without an import or a definition, the program is the lines of step 1.

EvalPlus parses the lines of step 2 with tree-sitter. Python's own parser gives the same
statements, because the lines are valid Python.
"""

import ast
import warnings
from collections.abc import Mapping, Set
from itertools import accumulate

NOT_PYTHON = (SyntaxError, ValueError, MemoryError, RecursionError)


def extract_program(text: str, entry_point: str = "") -> str:
    """Return the program in an answer. Without an `entry_point`, include all definitions."""
    source = longest_python(text)
    tree = parse(source)
    imports = []
    definitions: dict[str, ast.stmt] = {}
    for node in tree.body if tree else ():
        if is_import(node):
            imports.append(node)
        elif name := defined_name(node):
            definitions.setdefault(name, node)
    if entry_point:
        names = {name: names_in(node) for name, node in definitions.items()}
        reached = reachable(entry_point, names)
        definitions = {n: node for n, node in definitions.items() if n in reached}
    statements = [*imports, *definitions.values()]
    program = "\n".join(ast.get_source_segment(source, s) or "" for s in statements)
    return program or source


def longest_python(text: str) -> str:
    """Return the longest run of two or more lines that parses, else the first line."""
    lines = text.split("\n")
    filled = list(accumulate((bool(line.strip()) for line in lines), initial=0))
    longest, best = 0, lines[0]
    for start in range(len(lines)):
        for stop in range(len(lines), start + 1, -1):
            count = filled[stop] - filled[start]
            if (
                count <= longest
            ):  # all shorter runs from this start are not longer either
                break
            run = "\n".join(lines[start:stop])
            if parse(run):
                longest, best = count, run
                break
    return best


def parse(source: str) -> ast.Module | None:
    """Return the syntax tree; None for text that is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for escapes such as "\d"
        try:
            return ast.parse(source)
        except NOT_PYTHON:
            return None


def is_import(node: ast.stmt) -> bool:
    """Return True for an import other than from __future__, as in EvalPlus."""
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    return isinstance(node, ast.Import)


def defined_name(node: ast.stmt) -> str | None:
    """Return the name that a statement defines; None for a statement to leave out."""
    match node:
        case ast.ClassDef(name=name, decorator_list=[]):
            return name
        case (
            ast.FunctionDef(name=name, decorator_list=[])
            | ast.AsyncFunctionDef(name=name, decorator_list=[])
        ):
            returns = any(isinstance(each, ast.Return) for each in ast.walk(node))
            return name if returns else None
        case ast.Assign(targets=[ast.Name(id=name), *_]):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def names_in(node: ast.AST) -> set[str]:
    """Return all names in a statement, including names of attributes and arguments."""
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant):
            continue
        for _, value in ast.iter_fields(each):
            values = value if isinstance(value, list) else [value]
            names.update(value for value in values if isinstance(value, str))
    return names


def reachable(entry_point: str, names: Mapping[str, Set[str]]) -> set[str]:
    """Return all names that the definition of the entry point uses, directly or indirectly."""
    reached, waiting = {entry_point}, [entry_point]
    while waiting:
        new = names.get(waiting.pop(), frozenset()) - reached
        reached |= new
        waiting += new
    return reached
