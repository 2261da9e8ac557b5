import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.tree import Tree, ancestors, depths


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 9, vocab: int = 4) -> Tree:
    """Random trees; a node's parent is any smaller node, and probes hang anywhere above other probes."""
    n = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, n)]
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(n)]
    probes_from = draw(st.integers(1, n))
    if any(parents[c] >= probes_from for c in range(1, probes_from)):
        probes_from = n
    return Tree(tuple(tokens), tuple(parents), probes_from)


def path_to(tree: Tree, node: int) -> list[int]:
    return [*path_to(tree, tree.parents[node]), node] if node >= 0 else []


@given(trees())
def test_rows_of_the_mask_are_paths_from_the_root(tree: Tree) -> None:
    mask, depth = ancestors(tree.parents), depths(tree.parents)
    for node in range(len(tree.tokens)):
        path = path_to(tree, node)
        assert torch.nonzero(mask[node])[:, 0].tolist() == path
        assert depth[node] == len(path) - 1


@given(trees(), st.data())
def test_walk_follows_the_choices_and_never_enters_a_probe(tree: Tree, data: st.DataObject) -> None:
    choices = [data.draw(st.integers(0, 3)) for _ in tree.tokens]
    path = tree.walk(choices)
    assert path[0] == 0 and all(node < tree.probes_from for node in path)
    for parent, child in zip(path, path[1:]):
        assert tree.parents[child] == parent and tree.tokens[child] == choices[parent]
    last = path[-1]
    children = [c for c in range(1, tree.probes_from) if tree.parents[c] == last]
    assert all(tree.tokens[child] != choices[last] for child in children)


def test_the_drawn_mask() -> None:
    chain = Tree.chain(7, [8, 9])
    assert chain.drafted == 2 and chain.parents == (-1, 0, 1)
    assert ancestors(chain.parents).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    probes = Tree.chain(7, probes=[99, 99])
    assert probes.drafted == 0 and probes.parents == chain.parents


@pytest.mark.parametrize(
    ("choices", "path"),
    [((8, 9, 5), [0, 1, 2]), ((8, 5, 5), [0, 1]), ((5, 9, 5), [0])],
    ids=["always accepts", "sometimes accepts", "never accepts"],
)
def test_walk_on_a_chain(choices: tuple[int, ...], path: list[int]) -> None:
    assert Tree.chain(7, [8, 9]).walk(choices) == path
