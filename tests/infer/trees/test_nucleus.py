"""Test the trees of a window's candidates, and the authors' trees."""

import itertools
from collections.abc import Callable
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.drafters.candidates import Places
from infer.engine.output import Candidates
from infer.trees.nucleus import nucleus_tree
from infer.trees.token_graph import Drafts, TokenGraph, unroll
from tests.infer.trees.test_growth import check_likeliest

Ids = list[list[int]]
Chances = list[list[float]]


@st.composite
def lattices(draw: st.DrawFn) -> tuple[Ids, Chances]:
    """Draw candidates for up to four places, with decreasing probabilities."""
    row = st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True)
    ids = draw(st.lists(row, max_size=4))
    chance = st.floats(0.01, 0.99)
    return ids, [sorted((draw(chance) for _ in row), reverse=True) for row in ids]


def all_paths(ids: Ids, chances: Chances) -> dict[tuple[int, ...], float]:
    """Return every path through the lattice with its joint probability, by a slow method."""
    result = {}
    places = [list(zip(*row)) for row in zip(ids, chances)]
    for depth in range(1, len(places) + 1):
        for path in itertools.product(*places[:depth]):
            tokens, odds = zip(*path)
            result[tokens] = prod(odds)
    return result


def merged(ids: Ids, chances: Chances, prices: list[float]) -> Drafts:
    """Unroll a graph that exists beforehand, as a draft model's does.

    All candidates for a place are merged into the first one, so each may follow each.
    """
    graph = TokenGraph([7])
    first = 0
    for place, row in zip(ids, chances):
        nodes = [graph.add(first, token, chance) for token, chance in zip(place, row)]
        for rival in nodes[1:]:
            graph.merge(rival, nodes[0])
        first = nodes[0]
    return unroll(graph, prices, depth=len(ids))


def grown(ids: Ids, chances: Chances, prices: list[float]) -> Drafts:
    """Unroll a graph; its candidates are added on demand."""
    places = Places([7], Candidates(ids, chances), None, 9)
    return unroll(places.graph, prices, depth=len(ids), expand=places.expand)


BOTH = pytest.mark.parametrize("tree", [merged, grown])


@BOTH
@given(drawn=lattices(), nodes=st.integers(0, 12))
def test_the_tree_is_the_likeliest_paths(
    tree: Callable[..., Drafts], drawn: tuple[Ids, Chances], nodes: int
) -> None:
    drafts = tree(*drawn, [0.0] * nodes)
    check_likeliest(drafts, all_paths(*drawn), nodes)
    assert sum(drafts.endings()) == pytest.approx(1.0)


@BOTH
@pytest.mark.parametrize(
    ("prices", "tokens"),
    [
        ([0.0] * 9, [7, 1, 3, 2, 3, 4, 4]),
        ([0.0, 0.5, 0.0], [7, 1]),
        ([0.1, 0.25, 0.25, 0.25], [7, 1, 3, 2]),
        ([], [7]),
    ],
)
def test_a_node_is_drafted_while_its_chance_is_above_its_price(
    tree: Callable[..., Drafts], prices: list[float], tokens: list[int]
) -> None:
    ids, chances = [[1, 2], [3, 4]], [[0.6, 0.3], [0.7, 0.2]]
    assert tree(ids, chances, prices).tokens == tokens


DEPTH_5 = """
    0 1 2 3
    00 01 02 10 11 20 21 30
    000 001 002 010 011 020 021 100
    0000 0001 0002 0010 0011
    00000 00001 00002
"""


def paths_of(depth: int) -> set[str]:
    """Return the ranks on the path to every node of the authors' tree."""
    ids = [list(range(10))] * 13
    chances = [[0.5 / 2**rank for rank in range(10)]] * 13
    graph = Places([99], Candidates(ids, chances), None, 10)
    drafts = nucleus_tree(graph.graph, depth, graph.expand)
    paths = [""]
    for token, parent in zip(drafts.tokens[1:], drafts.parents[1:]):
        paths.append(paths[parent] + str(token))
    assert len(set(paths)) == len(paths)
    return set(paths[1:])


def test_the_authors_trees() -> None:
    """28 to 76 nodes at depth 5 to 13, as in the tables of the authors' decoder."""
    assert paths_of(5) == set(DEPTH_5.split())
    sizes = [len(paths_of(depth)) for depth in (5, 7, 9, 11, 13)]
    assert sizes == [28, 36, 46, 60, 76]
