import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infer.trees.tree import Tree, lineage


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 6, vocab: int = 4) -> Tree:
    """Random trees of drafts, with chains of probes under some of their nodes."""
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
def test_rows_of_the_mask_are_paths_from_the_root(tree: Tree) -> None:
    mask, depth = lineage(tree.parents)
    for node in range(len(tree.tokens)):
        path = path_to(tree, node)
        assert np.nonzero(mask[node])[0].tolist() == path
        assert depth[node] == len(path) - 1


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
    assert path[0] == 0 and all(node < tree.probes_from for node in path)
    assert requested == path  # and no other node's choice is made
    for parent, child in zip(path, path[1:]):
        assert tree.parents[child] == parent and tree.tokens[child] == choices[parent]
    rivals = [n for n in range(tree.probes_from) if tree.parents[n] == path[-1]]
    assert after == choices[path[-1]] not in [tree.tokens[n] for n in rivals]


@given(trees())
def test_probes_are_chains_under_their_nodes_and_stand_behind_all_drafts(
    tree: Tree,
) -> None:
    printed = [list(tree.probes_of(node)) for node in range(tree.probes_from)]
    assert sorted(sum(printed, [])) == list(range(tree.probes_from, len(tree.tokens)))
    for node, probes in enumerate(printed):
        assert bool(probes) == (node in tree.probed)
        assert [tree.parents[probe] for probe in probes] == [node, *probes][
            : len(probes)
        ]


def test_two_rivals_one_of_them_probed() -> None:
    """The picture in the module's docstring."""
    tree = Tree((5, 1, 2), (-1, 0, 0), 3).probe([2], [9, 9])
    assert lineage(tree.parents)[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 1, 1, 1],
    ]
    assert lineage(tree.parents)[1].tolist() == [0, 1, 1, 2, 3]
