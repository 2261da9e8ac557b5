import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.drafters.places import Places
from infer.engine.output import Candidates
from infer.trees.lattice import lattice, nucleus_tree
from infer.trees.token_graph import Drafts, unroll

Tree = Callable[[int, list[list[int]], list[list[float]], list[float]], Drafts]


@st.composite
def lattices(draw: st.DrawFn) -> tuple[list[list[int]], list[list[float]]]:
    """Candidates of up to four places, chances falling."""
    ids, chances = [], []
    for _ in range(draw(st.integers(0, 4))):
        m = draw(st.integers(1, 3))
        ids.append(
            draw(st.lists(st.integers(0, 99), min_size=m, max_size=m, unique=True))
        )
        chances.append(
            sorted((draw(st.floats(0.01, 0.99)) for _ in range(m)), reverse=True)
        )
    return ids, chances


def all_paths(
    ids: list[list[int]], chances: list[list[float]]
) -> dict[tuple[int, ...], float]:
    """The slow way: every path through the lattice with its joint chance."""
    result = {}
    for depth in range(1, len(ids) + 1):
        for ranks in itertools.product(*(range(len(row)) for row in ids[:depth])):
            joint = 1.0
            for place, rank in enumerate(ranks):
                joint *= chances[place][rank]
            result[tuple(ids[place][rank] for place, rank in enumerate(ranks))] = joint
    return result


def merged(
    root: int, ids: list[list[int]], chances: list[list[float]], prices: list[float]
) -> Drafts:
    """The tree of a lattice that is made before it is unrolled, as a draft model's answers are."""
    return unroll(lattice(root, ids, chances), prices, depth=len(ids))


def grown(
    root: int, ids: list[list[int]], chances: list[list[float]], prices: list[float]
) -> Drafts:
    """The tree of candidates that are looked for as it grows."""
    return Places([root], Candidates(ids, chances), None, 9).grow(
        prices, depth=len(ids)
    )


BOTH = pytest.mark.parametrize("tree", [merged, grown])


@BOTH
@given(drawn=lattices(), nodes=st.integers(0, 12))
def test_the_tree_is_the_likeliest_paths(
    tree: Tree, drawn: tuple[list, list], nodes: int
) -> None:
    ids, chances = drawn
    drafts = tree(7, ids, chances, [0.0] * nodes)
    expected = all_paths(ids, chances)
    assert len(drafts.tokens) == 1 + min(nodes, len(expected))
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(drafts.tokens)):
        assert drafts.parents[node] < node
        paths.append((*paths[drafts.parents[node]], drafts.tokens[node]))
        assert drafts.chances[node] == pytest.approx(expected[paths[-1]])
        assert drafts.depths[node] == len(paths[-1])
    assert len(set(paths)) == len(paths)
    left_out = [chance for path, chance in expected.items() if path not in paths]
    assert not left_out or max(left_out) <= min(drafts.chances) * (1 + 1e-12)
    assert sum(drafts.endings()) == pytest.approx(1.0)


@BOTH
def test_a_node_is_drafted_while_its_chance_is_above_its_price(tree: Tree) -> None:
    ids, chances = [[1, 2], [3, 4]], [[0.6, 0.3], [0.7, 0.2]]
    assert tree(0, ids, chances, [0.0] * 9).tokens == [0, 1, 3, 2, 3, 4, 4]
    assert tree(0, ids, chances, [0.0, 0.5, 0.0]).tokens == [0, 1]
    assert tree(0, ids, chances, [0.1, 0.25, 0.25, 0.25]).tokens == [0, 1, 3, 2]
    assert tree(0, ids, chances, []).tokens == [0]


DEPTH_5 = """
    0 1 2 3
    00 01 02 10 11 20 21 30
    000 001 002 010 011 020 021 100
    0000 0001 0002 0010 0011
    00000 00001 00002
"""


def paths_of(depth: int, width: int = 10) -> set[str]:
    """The ranks on the way to every node of a tree whose candidate for any place has its rank as token."""
    ids, weights = (
        [list(range(width))] * depth,
        [[0.5 / 2**rank for rank in range(width)]] * depth,
    )
    places = Places([99], Candidates(ids, weights), None, width)
    drafts = nucleus_tree(places.graph, depth, places.expand)
    paths = [""]
    for token, parent in zip(drafts.tokens[1:], drafts.parents[1:]):
        paths.append(paths[parent] + str(token))
    assert drafts.depths == [len(path) for path in paths] and len(set(paths)) == len(
        paths
    )
    assert drafts.chances[1:] == pytest.approx(
        [
            drafts.chances[p] * 0.5 / 2**t
            for t, p in zip(drafts.tokens[1:], drafts.parents[1:])
        ]
    )
    return set(paths[1:])


def test_the_papers_trees_have_the_authors_shapes() -> None:
    """28, 36, 46, 60 and 76 nodes at depth 5 to 13, as in the tables of the authors' decoder."""
    assert paths_of(5) == set(DEPTH_5.split())
    assert {depth: len(paths_of(depth)) for depth in (5, 7, 9, 11, 13)} == {
        5: 28,
        7: 36,
        9: 46,
        11: 60,
        13: 76,
    }
    assert all(paths_of(depth - 1) < paths_of(depth) for depth in (13, 9, 7, 5))
    deepest = paths_of(13)
    assert {
        "0" * 12 + "1",
        "000021",
        "00100",
        "0100",
    } < deepest and "00101" not in deepest


def test_a_paper_tree_has_as_many_levels_and_ranks_as_there_are_candidates() -> None:
    assert paths_of(5, width=2) == {
        path for path in DEPTH_5.split() if set(path) <= set("01")
    }
    places = Places(
        [9], Candidates([[1, 2, 3, 4]] * 2, [[0.4, 0.3, 0.2, 0.1]] * 2), None, 4
    )
    cut = nucleus_tree(places.graph, 5, places.expand)
    assert max(cut.depths) == 2 and len(cut.tokens) == 1 + 4 + 8
