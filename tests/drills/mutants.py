"""Wrong programs made from right ones, one change each."""

import ast
import copy
import random
from collections.abc import Callable, Iterator

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mod,
}


def mutants(source: str, rng: random.Random, most: int) -> Iterator[tuple[str, str]]:
    """(the change in words, the changed source): an empty body, and changes drawn from those there are."""
    tree = ast.parse(source)
    yield "returns None", ast.unparse(_without_bodies(copy.deepcopy(tree)))
    last = [node for node in tree.body if isinstance(node, ast.FunctionDef)][-1]
    places = [(number, change) for number, node in enumerate(ast.walk(last)) if (change := _change(node))]
    for number, change in rng.sample(places, min(most - 1, len(places))):
        changed = copy.deepcopy(tree)
        function = [node for node in changed.body if isinstance(node, ast.FunctionDef)][-1]
        node = list(ast.walk(function))[number]
        words = change(node)
        yield f"line {getattr(node, 'lineno', 0)}: {words}", ast.unparse(changed)


def _without_bodies(tree: ast.Module) -> ast.Module:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Return(ast.Constant(None))]
    return tree


def _change(node: ast.AST) -> Callable[[ast.AST], str] | None:
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in _FLIPPED:
            return _flip
        case ast.BinOp(op=operator) if type(operator) in _SWAPPED:
            return _swap
        case ast.Constant(value=bool()):
            return _negate
        case ast.Constant(value=int()):
            return _off_by_one
        case ast.Return(value=ast.expr()):
            return _lose
    return None


def _flip(node: ast.AST) -> str:
    assert isinstance(node, ast.Compare)
    node.ops[0] = _FLIPPED[type(node.ops[0])]()
    return f"comparison flipped to {type(node.ops[0]).__name__}"


def _swap(node: ast.AST) -> str:
    assert isinstance(node, ast.BinOp)
    node.op = _SWAPPED[type(node.op)]()
    return f"operator swapped to {type(node.op).__name__}"


def _negate(node: ast.AST) -> str:
    assert isinstance(node, ast.Constant)
    node.value = not node.value
    return f"constant negated to {node.value}"


def _off_by_one(node: ast.AST) -> str:
    assert isinstance(node, ast.Constant) and isinstance(node.value, int)
    node.value = node.value + 1
    return f"constant off by one: {node.value}"


def _lose(node: ast.AST) -> str:
    assert isinstance(node, ast.Return)
    node.value = ast.Constant(None)
    return "return value lost"
