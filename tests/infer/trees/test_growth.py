"""Test growth against a literal reference of the paper, and the properties of every graph."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.trees.growth import Growth, Rules
from infer.trees.token_graph import Drafts, TokenGraph, unroll
from tests.infer.trees import literal

ROOT = 0


def a_model(seed: int, vocabulary: int, memory: int) -> literal.Model:
    """A model with probabilities that depend on a path's last tokens only, so that texts repeat."""

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


def check_likeliest(
    drafts: Drafts, expected: dict[tuple[int, ...], float], count: int
) -> None:
    """Check that the likeliest of the expected paths are drafted, up to `count`."""
    assert len(drafts.tokens) == 1 + min(count, len(expected))
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(drafts.tokens)):
        paths.append((*paths[drafts.parents[node]], drafts.tokens[node]))
        # No path occurs twice.
        assert drafts.chances[node] == pytest.approx(expected.pop(paths[-1]))
        assert drafts.depths[node] == len(paths[-1])
    assert not expected or max(expected.values()) <= min(drafts.chances) * (1 + 1e-12)


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
    check_likeliest(drafts, dict(literal.hypotheses(nodes[0], depth)), count)


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
    """Below theta_prob it is a leaf. With draws for verification by ratio no sibling is dropped."""
    growth = Growth(ROOT, Rules(theta_prob=0.4, theta_sib=0.5), most=9, draws=draws)
    growth.grow([[1, 2, 3, 4]], [[0.5, 0.25, 0.2, 0.01]])
    assert growth.graph.tokens == list(range(1 + drafted)) and growth.frontier == [1]
