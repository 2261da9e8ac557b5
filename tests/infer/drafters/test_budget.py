"""AutoBudget: how deep it drafts, against every fixed depth, on simulated chains with known costs."""

import random

import pytest

from infer.drafters.auto import FIRST, PUT_ASIDE
from infer.drafters.budget import AutoBudget
from infer.drafters.costs import Costs
from infer.loop import Verified
from infer.trees.growth import Growth, Rules
from infer.trees.tree import Tree

DEPTH, STEPS = 10, 1500
CHAIN = Rules(k=1, depth=DEPTH, theta_prob=0.0, tau=None)
TARGET = Costs((1, 8, 64), (10.0, 10.2, 12.0))
DRAFT = Costs((1, 64), (1.0, 1.2))
DRAFTED, OTHER = 1, 2  # tokens


def verified(tokens: list[int], rows: int, seconds: float) -> Verified:
    *accepted, choice = tokens
    return Verified(
        Tree.chain(0, accepted), range(len(tokens)), choice, None, rows, seconds
    )


def fixed_rate(right: float, depth: int, draft: Costs) -> float:
    """Tokens per millisecond of chains of so many drafts, each right with this chance behind right ones."""
    return sum(right**n for n in range(depth + 1)) / (
        TARGET(1 + depth) + depth * draft(1)
    )


def simulated(said: float, right: float, draft: Costs) -> tuple[int, float, float]:
    """Tokens and milliseconds of all steps, and the tokens per millisecond of the later half."""
    random_ = random.Random(0)
    budget, emitted, spent = AutoBudget(TARGET, draft), [0], [0.0]
    for _ in range(STEPS):
        growth, levels, rows = (
            Growth(0, CHAIN, most=DEPTH, calibrated=budget.chance),
            0,
            1,
        )
        if budget.drafting:
            while levels < DEPTH and budget.deepens(levels, growth.reach, 1):
                growth.grow([[DRAFTED]], [[said]])
                levels += 1
            rows = len(budget.verified(growth.graph, depth=DEPTH).tokens)
        text = [DRAFTED if random_.random() < right else OTHER for _ in range(rows)]
        accepted = next(
            (n for n, token in enumerate(text[:-1]) if token == OTHER), rows - 1
        )
        ms = TARGET(rows) + levels * draft(1)
        drafting = 1e-3 * levels * draft(1)
        graph = growth.graph if levels else None
        budget.learn(
            graph,
            verified(text[: accepted + 1], rows, 1e-3 * ms),
            [1] * levels,
            drafting,
        )
        emitted.append(emitted[-1] + accepted + 1)
        spent.append(spent[-1] + ms)
    half = STEPS // 2
    return (
        emitted[-1],
        spent[-1],
        (emitted[-1] - emitted[half]) / (spent[-1] - spent[half]),
    )


@pytest.mark.parametrize(
    ("said", "right"), [(0.5, 0.9), (0.95, 0.5), (0.99, 0.3), (0.9, 0.9)]
)
def test_it_drafts_as_deep_as_pays_whatever_the_draft_model_says_of_itself(
    said: float, right: float
) -> None:
    """Within 5 % of the best fixed depth, of a draft model that trusts itself too little, too much, rightly."""
    best = max(fixed_rate(right, depth, DRAFT) for depth in range(DEPTH + 1))
    tokens, spent, later = simulated(said, right, DRAFT)
    assert tokens / spent > 0.95 * best and later > 0.95 * best


@pytest.mark.parametrize(
    ("said", "right"), [(0.5, 0.9), (0.95, 0.5), (0.99, 0.3), (0.99, 0.02)]
)
@pytest.mark.parametrize("ms", [1.0, 5.0, 12.0])
def test_it_loses_no_more_than_its_credit(said: float, right: float, ms: float) -> None:
    """Against plain decoding: the first credit, a share of the time, and the step that exceeded them."""
    draft = Costs((1, 64), (ms, ms))
    tokens, spent, _ = simulated(said, right, draft)
    plain = TARGET(1)
    step = TARGET(1 + DEPTH) + DEPTH * ms
    assert spent < (1 + PUT_ASIDE) * tokens * plain + FIRST * plain + step
