import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.drafters.adaptive import FixedPolicy
from infer.engine.reading import Candidates
from infer.trees.lattice import grow


@st.composite
def lattices(draw: st.DrawFn) -> tuple[list[list[int]], list[list[float]]]:
    """Candidates of up to four places, chances falling."""
    ids, chances = [], []
    for _ in range(draw(st.integers(0, 4))):
        m = draw(st.integers(1, 3))
        ids.append(draw(st.lists(st.integers(0, 99), min_size=m, max_size=m, unique=True)))
        chances.append(sorted((draw(st.floats(0.01, 0.99)) for _ in range(m)), reverse=True))
    return ids, chances


def all_paths(ids: list[list[int]], chances: list[list[float]]) -> dict[tuple[int, ...], float]:
    """The slow way: every path through the lattice with its joint chance."""
    found = {}
    for depth in range(1, len(ids) + 1):
        for ranks in itertools.product(*(range(len(row)) for row in ids[:depth])):
            joint = 1.0
            for place, rank in enumerate(ranks):
                joint *= chances[place][rank]
            found[tuple(ids[place][rank] for place, rank in enumerate(ranks))] = joint
    return found


@given(lattices(), st.integers(0, 12))
def test_the_tree_is_the_likeliest_paths(lattice: tuple[list, list], nodes: int) -> None:
    ids, chances = lattice
    drafts = grow(7, ids, chances, [0.0] * nodes)
    wanted = all_paths(ids, chances)
    assert len(drafts.tokens) == 1 + min(nodes, len(wanted))
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(drafts.tokens)):
        assert drafts.parents[node] < node
        paths.append((*paths[drafts.parents[node]], drafts.tokens[node]))
        assert drafts.chances[node] == pytest.approx(wanted[paths[-1]])
        assert drafts.depths[node] == len(paths[-1])
    assert len(set(paths)) == len(paths)
    left_out = [chance for path, chance in wanted.items() if path not in paths]
    assert not left_out or max(left_out) <= min(drafts.chances) * (1 + 1e-12)
    assert sum(drafts.endings()) == pytest.approx(1.0)


def test_a_node_is_drafted_while_its_chance_is_above_its_price() -> None:
    ids, chances = [[1, 2], [3, 4]], [[0.6, 0.3], [0.7, 0.2]]
    assert grow(0, ids, chances, [0.0] * 9).tokens == [0, 1, 3, 2, 3, 4, 4]
    assert grow(0, ids, chances, [0.0, 0.5, 0.0]).tokens == [0, 1]
    assert grow(0, ids, chances, [0.1, 0.25, 0.25, 0.25]).tokens == [0, 1, 3, 2]
    assert grow(0, ids, chances, []).tokens == [0]


def shapes_of(policy: FixedPolicy, candidates: Candidates) -> tuple[list[int], list[int]]:
    """The tree's parents, and the ids that its candidates of place j and rank r have as 10 j + r."""
    drafts, *_ = policy.shape(99, candidates, left=20)
    return drafts.parents, drafts.tokens


def test_a_tree_of_fixed_shape_does_not_look_at_the_weights() -> None:
    ids = [[10 * place + rank for rank in range(3)] for place in range(4)]
    sure, unsure = ([[0.9, 0.05, 0.01]] * 4, [[0.4, 0.35, 0.25]] * 4)
    fixed, lattice = FixedPolicy(4, "root", 9, 3), FixedPolicy(4, "root", 9, 3, graph=True)
    shapes = [shapes_of(fixed, Candidates(ids, weights)) for weights in (sure, unsure)]
    assert shapes[0] == shapes[1]
    # One half for every place that the first candidate holds; 0.15 and 0.07 for the others.
    assert shapes[0] == ([-1, 0, 1, 0, 2, 1, 3, 0, 4, 2], [99, 0, 10, 1, 20, 11, 10, 2, 30, 21])
    assert shapes_of(lattice, Candidates(ids, sure)) != shapes_of(lattice, Candidates(ids, unsure))
