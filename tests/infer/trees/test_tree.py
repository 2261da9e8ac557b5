"""Test trees: masks, probes and walks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infer.trees.tree import Tree, lineage


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 6, vocab: int = 4) -> Tree:
    """Draw trees of drafts, with chains of probes under some of their nodes."""
    n = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, n)]
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(n)]
    tree = Tree(tuple(tokens), tuple(parents), n)
    under = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=3))
    k = draw(st.integers(1, 3))
    return tree.probe(under, [vocab - 1] * k) if under else tree


def path_to(tree: Tree, node: int) -> list[int]:
    return [*path_to(tree, tree.parents[node]), node] if node >= 0 else []


@given(trees())
def test_a_node_sees_its_path_and_probes_are_chains_after_all_drafts(
    tree: Tree,
) -> None:
    ancestors, depths = lineage(tree.parents)
    for node in range(len(tree.tokens)):
        path = path_to(tree, node)
        assert np.nonzero(ancestors[node])[0].tolist() == path
        assert depths[node] == len(path) - 1
    probes: list[int] = []
    for node in tree.probed:
        chain = list(tree.probes_of(node))
        assert [tree.parents[probe] for probe in chain] == [node, *chain[:-1]]
        probes += chain
    assert probes == list(range(tree.probes_from, len(tree.tokens)))
    assert not any(tree.probes_of(n) for n in range(9) if n not in tree.probed)


@given(trees(), st.data())
def test_walk_follows_the_choices_and_never_enters_a_probe(
    tree: Tree, data: st.DataObject
) -> None:
    choices = [data.draw(st.integers(0, 3)) for _ in tree.tokens]
    requested: list[int] = []

    def choose(node: int) -> int:
        requested.append(node)
        return choices[node]

    path, after = tree.walk(choose)
    assert requested == path  # no other node's choice is computed
    assert path[0] == 0 and all(node < tree.probes_from for node in path)
    for parent, child in zip(path, path[1:]):
        assert tree.parents[child] == parent and tree.tokens[child] == choices[parent]
    assert after == choices[path[-1]]
    assert after not in [tree.tokens[node] for node in tree.children(path[-1])]


def test_two_rivals_one_of_them_probed() -> None:
    """The example of tree.py."""
    tree = Tree((5, 1, 2), (-1, 0, 0), 3).probe([2], [9, 9])
    rows = ["".join(map(str, row)) for row in lineage(tree.parents)[0].astype(int)]
    assert rows == ["10000", "11000", "10100", "10110", "10111"]
