"""The program in a chat model's answer, by EvalPlus's rule (its sanitize.py). Pure.

1. The longest run of lines that parses as Python, counted in lines with text; the first of
   equally long ones. Prose, fences and a function that was cut off are left out.
2. Its imports, then its definitions in their order: classes, functions with a return
   statement, assignments to a name; of two definitions of a name the first. Definitions
   that the entry point does not reach by names are left out, and so are other statements
   and decorated definitions. Without an import or a definition it is the lines of step 1.

EvalPlus reads the lines of step 2 by tree-sitter. Python's own parser gives the same
statements, since the lines parse.
"""

import ast
import warnings
from collections.abc import Mapping, Set
from itertools import accumulate

NOT_PYTHON = (SyntaxError, ValueError, MemoryError, RecursionError)


def extract_program(text: str, entry_point: str = "") -> str:
    """Return the program in an answer. Without an `entry_point` all definitions are kept."""
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
            if count <= longest:  # and so are all shorter runs from here
                break
            run = "\n".join(lines[start:stop])
            if parse(run):
                longest, best = count, run
                break
    return best


def parse(source: str) -> ast.Module | None:
    """Return the syntax tree; None for text that is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes such as "\d"
        try:
            return ast.parse(source)
        except NOT_PYTHON:
            return None


def is_import(node: ast.stmt) -> bool:
    """Return True for an import that EvalPlus keeps: not of __future__."""
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    return isinstance(node, ast.Import)


def defined_name(node: ast.stmt) -> str | None:
    """Return the name that a statement defines; None for a statement that is left out."""
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
    """Return all names in a statement, those of attributes and arguments too."""
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant):
            continue
        for _, value in ast.iter_fields(each):
            values = value if isinstance(value, list) else [value]
            names.update(value for value in values if isinstance(value, str))
    return names


def reachable(entry_point: str, names: Mapping[str, Set[str]]) -> set[str]:
    """Return the names that definitions reach from the entry point."""
    reached, waiting = {entry_point}, [entry_point]
    while waiting:
        new = names.get(waiting.pop(), frozenset()) - reached
        reached |= new
        waiting += new
    return reached
