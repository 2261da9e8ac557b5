"""GSD's figures: counts of drafts, recurrence and the cost of merging."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.api import Model, load
from infer.bench import gsd
from infer.bench.gsd import (
    DraftedText,
    StepCounts,
    divergences,
    figures,
    node_log_probabilities,
    recurring,
)
from infer.config import DecodeConfig
from infer.trees.growth import Rules
from infer.trees.token_graph import Outcome, TokenGraph, unroll
from tests.benchmarks import sibling_pruning
from tests.infer.trees import literal
from tests.infer.trees.test_growth import MODELS, ROOT

Y, A, B, C, D = range(5)


def tree_of(*parents_and_tokens: tuple[int, int]) -> TokenGraph:
    graph = TokenGraph([Y])
    for parent, token in parents_and_tokens:
        graph.add(parent, token, 0.5)
    return graph


def merged_graph() -> TokenGraph:
    """Return the graph drawn in gsd.py: b's child a is merged into the root's."""
    graph = tree_of((0, B), (0, A), (1, A), (2, C))
    graph.merge(3, 2)
    return graph


def accept(graph: TokenGraph, *nodes: int) -> Outcome:
    """Return the outcome of accepting these nodes of the graph, one behind the other."""
    drafts = unroll(graph, [0.0] * 10, depth=10)
    path = [0]
    for node in nodes:
        behind = (at for at, parent in enumerate(drafts.parents) if parent == path[-1])
        path.append(next(at for at in behind if drafts.nodes[at] == node))
    return Outcome(
        graph, drafts, path, [*(drafts.tokens[at] for at in path[1:]), D], rows=4
    )


@pytest.mark.parametrize(
    ("nodes", "tokens", "ranks", "succeeded"),
    [
        ((), 1, (), False),
        ((2, 4), 3, (2, 1), False),
        ((1, 3), 3, (1, 1), False),
        ((1, 3, 4), 4, (1, 1, 1), True),
    ],
)
def test_a_step_counts_ranks_and_merges(
    nodes: tuple[int, ...], tokens: int, ranks: tuple[int, ...], succeeded: bool
) -> None:
    counts = StepCounts.of(accept(merged_graph(), *nodes))
    assert counts == StepCounts(3, 2, 4, tokens, ranks, succeeded)


def test_figures_are_those_of_the_drafts() -> None:
    """Acceptance is by level drafted, averaged over texts, as the authors count; two steps drafted nothing."""
    graph = merged_graph()
    first = DraftedText([1] * 8, 3, 5, [accept(graph, 1, 3, 4), accept(graph, 2)])
    second = DraftedText([1] * 4, 4, 1, [accept(graph, 1)])
    row = figures([first, second])
    assert row["acceptance_rate"] == ((3 + 1) / 4 + 1 / 2) / 2
    assert row["drafted_share"] == 6 / 12 and row["mean_acceptance_length"] == 1 + 5 / 3
    assert row["levels"] == 2 and row["graph_success"] == pytest.approx(1 / 3)
    assert row["drafted_per_token"] == 9 / (
        4 + 2 + 2 + 2
    )  # merged nodes are not drafted anew
    assert row["fed_per_token"] == 12 / (4 + 2 + 2 + 2)
    assert row["rank_shares"] == [4 / 5, 1 / 5, 0, 0]
    assert set(figures([DraftedText([1, 2], 2, 0, [])]).values()) == {None}


def test_n_grams_recur_in_other_branches() -> None:
    """The trees drawn in measure_recurrence; what repeats along one path does not recur."""
    tree = tree_of((0, A), (1, B), (2, C), (0, D), (4, A), (5, B), (6, C))
    assert (
        recurring(tree, 1)
        == recurring(tree, 2)
        == recurring(tree, 3)
        == {1, 2, 3, 5, 6, 7}
    )
    assert recurring(tree, 4) == set()
    assert recurring(tree_of((0, A), (1, A), (2, A)), 1) == set()


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), max_size=20),
    st.integers(1, 4),
)
def test_recurrence_is_that_of_all_pairs_of_paths(
    nodes: list[tuple[int, int]], n: int
) -> None:
    tree = tree_of(
        *((parent % (index + 1), token) for index, (parent, token) in enumerate(nodes))
    )
    paths: list[list[int]] = [[]]
    for node in range(1, len(tree.tokens)):
        paths.append([*paths[tree.parents[node]], node])
    expected: set[int] = set()
    for item in range(1, len(paths)):
        for other in range(1, len(paths)):
            related = item in paths[other] or other in paths[item]
            grams = [
                [tree.tokens[node] for node in path[-n:]]
                for path in (paths[item], paths[other])
            ]
            if not related and len(grams[0]) == n and grams[0] == grams[1]:
                expected |= {*paths[item][-n:], *paths[other][-n:]}
    assert recurring(tree, n) == expected


def test_merging_is_compared_with_the_draft_models_forward_on_each_path(
    model: Model,
) -> None:
    context = [7, 50, 9, 100]
    graph = tree_of((0, 50), (0, 9), (1, 9), (2, 60))
    graph.tokens[0] = context[-1]
    graph.merge(3, 2)
    paths = [
        context,
        [*context, 50],
        [*context, 9],
        [*context, 50, 9],
        [*context, 9, 60],
    ]
    with torch.inference_mode():
        rows = [
            model.lm(torch.tensor([path])).logits[0, -1].double().log_softmax(-1)
            for path in paths
        ]
        result = node_log_probabilities(model.lm, context, graph)
    assert torch.allclose(result, torch.stack(rows), atol=1e-4)
    expected = torch.nn.functional.kl_div(
        rows[2], rows[3], log_target=True, reduction="sum"
    )
    assert divergences(result, graph) == pytest.approx([float(expected)], rel=1e-3)


def test_every_setting_is_measured_losslessly(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's first layer drafts for it; fewer likely nodes are drafted with a higher theta_prob."""
    model = load(model_dir, "float32", draft="self:1")
    default = DecodeConfig(
        "gsd",
        k=4,
        theta_prob=0.2,
        theta_sib=0.3,
        tau=2,
        nodes=12,
        max_new_tokens=8,
    )
    prompts = [[7, 50, 9, 100], [3, 4, 5]]
    for name, values in {
        "K": (2,),
        "TAU": (0,),
        "THETA_PROB": (0.01, 0.6),
        "THETA_SIB": (0.1,),
    }.items():
        monkeypatch.setattr(gsd, f"ABLATED_{name}", values)
    rows = [
        gsd.measure_setting(model, prompts, setting)
        for setting in gsd.settings(default)
    ]
    assert gsd.lossy(rows) == [] and len(rows) == 9 + 2 + 1 + 2 + 1
    by_name = {row["setting"]: row for row in rows}
    loose, strict = (by_name[f"gsd theta_prob={value}"] for value in ("0.01", "0.6"))
    assert loose["drafted_per_token"] > (strict["drafted_per_token"] or 0)  # type: ignore[operator]
    rows[0]["identical"] = 1
    assert gsd.lossy(rows) == ["greedy ssd"]
    merging = gsd.measure_merging(
        model, prompts, replace(default, theta_prob=0.001, theta_sib=0.0, tau=0)
    )
    assert merging["merged"] and float(merging["mean_kl"]) > 0  # type: ignore[arg-type]
    recurrence = gsd.measure_recurrence(model, prompts, default)
    assert [row["n"] for row in recurrence] == [1, 2, 3, 4, 5] and recurrence[0][
        "tokens"
    ]


def test_theta_sib_drafts_and_accepts_as_the_authors_rule_does(model_dir: str) -> None:
    """Sibling pruning made leaves of pruned siblings, which were drafted and accepted all the same: the shares
    by rank hardly moved with theta_sib. The model's first layer drafts for it.
    """
    model = load(model_dir, "float32", draft="self:1")
    model.lm.double()
    prompts = [[7, 50, 9, 100], [3, 4, 5]]
    drafted: list[float] = []
    for theta in (0.0, 0.3, 0.7):
        rules = Rules(depth=3, theta_prob=0.05, theta_sib=theta)
        counted = sibling_pruning.ours(model, prompts, rules, 24)
        assert counted == sibling_pruning.reference(
            sibling_pruning.rule_step, model, prompts, rules, 24
        )
        assert counted.ranks.total() > 4
        drafted.append(counted.drafted / counted.steps)
    assert drafted[0] > drafted[1] > drafted[2]


@given(MODELS, st.integers(1, 3), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_authors_graph_is_the_papers_without_leaves_and_merging(
    draft: literal.Model, k: int, theta_sib: float
) -> None:
    rules = Rules(k=k, depth=3, theta_prob=0.0, theta_sib=theta_sib, tau=None)
    nodes = sibling_pruning.authors_graph(
        ROOT, lambda path: list(draft(path))[:k], rules, rules.depth
    )
    assert [node.path for node in nodes] == [
        node.path for node in literal.draw(ROOT, draft, **vars(rules))
    ]
