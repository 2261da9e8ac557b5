"""Policies that learn are kept by the texts they serve, and costs by the work there is."""

from functools import partial

from infer.drafters.auto import MOST, Learners, Policies
from infer.drafters.budget import AutoBudget
from infer.drafters.costs import Costs, prior_costs
from infer.engine.sampling import Sampling
from infer.loop import Verified
from infer.trees.tree import Tree

COSTS = Costs((1, 64), (1.0, 2.0))


def test_policies_are_kept_apart_by_sampling_and_costs_by_work() -> None:
    """custom_generate measured L(q) again for each temperature and top_p: each began with what it cost."""
    policies, loaded = Policies(), list[str]()
    auto = partial(policies.auto, load=lambda: loaded.append("") or [COSTS])
    ways = [
        Sampling(),
        Sampling(0.3),
        Sampling(1.5),
        Sampling(1.0, 5),
        Sampling(1.0, 0, 0.9),
        Sampling(1.0, 0, 0.2),
    ]
    texts = [(k, batch, capacity) for k in (2, 3) for batch in (1, 2) for capacity in (100, 2000)]
    result = [
        [
            auto(k, frozenset(), batch=batch, capacity=capacity, sampling=way)
            for k, batch, capacity in texts
            for way in ways
        ]
        for _ in range(2)
    ]
    assert result[0] == result[1] and len(set(map(id, result[0]))) == len(texts) * len(ways)
    assert len(loaded) == 4 * 4  # greedy, sampled, by top_k, by top_p: whatever k is


def test_no_more_are_kept_than_there_is_room_for() -> None:
    """A service that takes any temperature would have kept a policy of each for good."""
    policies = Policies()
    auto = partial(policies.auto, 3, frozenset(), batch=1, capacity=100, load=lambda: [COSTS])
    first = auto(sampling=Sampling(1.0))
    second = auto(sampling=Sampling(2.0))
    for number in range(MOST - 1):
        auto(sampling=Sampling(3.0 + number))
        assert auto(sampling=Sampling(1.0)) is first
    assert auto(sampling=Sampling(2.0)) is not second


def test_budgets_are_bounded_as_policies_are() -> None:
    """Those of a draft model had a dict of their own: one was kept for every temperature, for good, and rows
    were timed again for each.
    """
    learners, loaded = Learners[AutoBudget](), list[int]()
    load = lambda: loaded.append(1) or [COSTS, COSTS]  # noqa: E731
    find = partial(learners.find, batch=1, capacity=100, load=load, new=lambda both: AutoBudget(*both))
    first = find("gsd", sampling=Sampling(1.0))
    assert find("tsd", sampling=Sampling(1.0)) is not first
    for number in range(MOST):
        find("gsd", sampling=Sampling(2.0 + number))
    assert find("gsd", sampling=Sampling(1.0)) is not first and len(loaded) == 1


def test_a_new_policy_begins_with_what_another_learned() -> None:
    policies = Policies()
    auto = partial(policies.auto, sources=frozenset(), batch=1, capacity=100)
    first = auto(3, sampling=Sampling(1.0), load=lambda: [prior_costs("cpu")])
    for rows in [1] * 4 + [8] * 40:
        first.learn(None, Verified(Tree.chain(0), [0], 1, None, rows, 0.01 * rows))
    second = auto(5, sampling=Sampling(0.5), load=list)
    assert second.tables == first.tables and second.tables[0](8) > 3
