"""Growth against the paper word for word, and properties of every graph."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.trees.growth import Growth, Rules
from infer.trees.token_graph import TokenGraph, unroll
from tests.infer.trees import literal

ROOT = 0


def a_model(seed: int, vocabulary: int, memory: int) -> literal.Model:
    """Chances depend on a path's last tokens only: texts repeat and branches meet."""

    def likeliest(path: tuple[int, ...]) -> list[tuple[int, float]]:
        facts = repr((seed, path[-memory:])).encode()
        key = hashlib.blake2b(facts, digest_size=8).digest()
        chances = np.random.default_rng(list(key)).dirichlet([0.4] * vocabulary)
        order = np.argsort(-chances, kind="stable")
        return [(int(token), float(chances[token])) for token in order]

    return likeliest


def grown(model: literal.Model, rules: Rules, most: int = 10_000) -> TokenGraph:
    growth = Growth(ROOT, rules, most=most)
    for _ in range(rules.depth):
        if not growth.frontier:
            break
        rows = [model(path_to(growth.graph, node)) for node in growth.frontier]
        growth.grow(*([[pair[i] for pair in row] for row in rows] for i in (0, 1)))
    return growth.graph


def path_to(graph: TokenGraph, node: int) -> tuple[int, ...]:
    return (*(path_to(graph, graph.parents[node]) if node else ()), graph.tokens[node])


RULES = st.builds(
    Rules,
    k=st.integers(1, 4),
    depth=st.integers(1, 5),
    theta_prob=st.sampled_from([0.0, 0.1, 0.2, 0.4]),
    theta_sib=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    tau=st.sampled_from([None, 1, 2, 3]),
)
MODELS = st.builds(a_model, st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 4))


@settings(max_examples=300)
@given(MODELS, RULES, st.integers(0, 30), st.integers(0, 8))
def test_a_graph_grows_and_is_unrolled_as_in_the_paper(
    model: literal.Model, rules: Rules, count: int, depth: int
) -> None:
    graph = grown(model, rules)
    nodes = literal.draw(ROOT, model, **vars(rules))
    index: dict[literal.Node | None, int] = {node: n for n, node in enumerate(nodes)}
    assert graph.tokens == [node.token for node in nodes]
    assert graph.parents == [index.get(node.parent, -1) for node in nodes]
    merged = {index[node]: index[node.into] for node in nodes if node.into}
    assert graph.merged == merged

    drafts = unroll(graph, [0.0] * count, depth=depth)
    expected = dict(literal.hypotheses(nodes[0], depth))
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(drafts.tokens)):
        paths.append((*paths[drafts.parents[node]], drafts.tokens[node]))
        # No path occurs twice.
        assert drafts.chances[node] == pytest.approx(expected.pop(paths[-1]))
        assert drafts.depths[node] == len(paths[-1])
    assert len(paths) == 1 + min(count, len(paths) - 1 + len(expected))
    assert not expected or max(expected.values()) <= min(drafts.chances) * (1 + 1e-9)


@settings(max_examples=100)
@given(MODELS, RULES, st.integers(1, 12))
def test_the_number_of_rows_is_bounded(
    model: literal.Model, rules: Rules, most: int
) -> None:
    graph = grown(model, rules, most)
    inner = [node for node, children in enumerate(graph.children) if children]
    assert len(set(inner) - graph.merged.keys()) <= most


@pytest.mark.parametrize(("draws", "drafted"), [(False, 2), (True, 4)])
def test_a_sibling_below_theta_sib_is_not_drafted(draws: bool, drafted: int) -> None:
    """Below theta_prob it is a leaf; draws for verification by ratio all stay."""
    growth = Growth(ROOT, Rules(theta_prob=0.4, theta_sib=0.5), most=9, draws=draws)
    growth.grow([[1, 2, 3, 4]], [[0.5, 0.25, 0.2, 0.01]])
    assert growth.graph.tokens == list(range(1 + drafted)) and growth.frontier == [1]


def test_a_cycle_is_not_closed() -> None:
    """With τ=1 two tokens that follow each other could be merged into each other."""
    rules = Rules(k=2, depth=2, theta_prob=0, theta_sib=0, tau=1)
    graph = grown(lambda path: [(1, 0.5), (2, 0.5)], rules)
    assert graph.tokens == [0, 1, 2, 1, 2, 1, 2]
    # 4, a 2 after the first 1, is merged into the first 2. So the first 1 is on a path
    # to 5, the 1 after that 2, which is merged into the next one instead.
    assert graph.merged == {4: 2, 5: 3}


def test_the_papers_example() -> None:
    """Figures 2 and 4 with the, a, one, red, car as 0 to 4: see token_graph.py."""
    following = {0: [(1, 0.6), (2, 0.4)], 1: [(3, 0.9)], 2: [(3, 0.9)], 3: [(4, 0.9)]}
    graph = grown(lambda path: following[path[-1]], Rules(k=2, depth=3, tau=1))
    assert (graph.tokens, graph.merged) == ([0, 1, 2, 3, 3, 4], {4: 3})
    assert graph.parents == [-1, 0, 0, 1, 2, 3]
    drafts = unroll(graph, [0.0] * 99, depth=9)
    assert drafts.tokens == [0, 1, 3, 4, 2, 3, 4]
    assert drafts.nodes == [0, 1, 3, 5, 2, 4, 5]
    assert drafts.shared(graph) == {6}  # "car" was drafted after the first "red"
