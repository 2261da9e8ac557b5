"""The policy that buys rows: against brute force, and on devices whose costs are chosen."""

import random

import pytest

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy, Policy
from infer.drafters.auto import MOST, AutoPolicy, Calibration, best_plan, slopes
from infer.drafters.costs import Costs
from infer.engine.reading import Candidates
from infer.trees.layout import extent

FLAT = Costs((1, 64), (10.0, 10.0))  # a GPU: rows cost nothing
STEEP = Costs((1, 64), (10.0, 640.0))  # rows cost as much as forwards
CPU = Costs((1, 2, 4, 8, 16, 32, 64), (10.0, 10.0, 10.5, 11.5, 14.0, 19.0, 30.0))


def simulated_rate(costs: Costs, accepted: list[float], k: int, m: int, sites: set[int], steps: int) -> float:
    """The slow way: walk the two states, a draft at hand or not, and count."""
    rng, tokens, ms, at_hand = random.Random(0), 0, 0.0, False
    for _ in range(steps):
        if not at_hand:
            tokens, ms, at_hand = tokens + 1, ms + costs(1 + k), True
            continue
        right = next((j for j in range(m) if rng.random() >= accepted[j]), m)
        tokens, ms, at_hand = tokens + 1 + right, ms + costs(1 + m + k * len(sites)), right in sites
    return tokens / ms


@pytest.mark.parametrize("costs", [FLAT, CPU], ids=["flat", "cpu"])
@pytest.mark.parametrize("accepted", [[0.6, 0.6, 0.5], [0.9, 0.9, 0.9], [0.2, 0.2, 0.2]])
def test_the_closed_form_is_the_best_of_all_plans(costs: Costs, accepted: list[float]) -> None:
    ms = [0.0, *(costs(q) for q in range(1, 65))]
    rate, k = best_plan(ms, accepted)
    subsets = lambda m: ({n for n in range(m + 1) if mask >> n & 1} for mask in range(2 ** (m + 1)))  # noqa: E731
    rates = {
        (k, m, tuple(sites)): simulated_rate(costs, accepted, k, m, sites, 4000)
        for k in (1, 2, 3)
        for m in range(1, k + 1)
        for sites in subsets(m)
    }
    best = max(rates.values())
    assert rate == pytest.approx(best, rel=0.04)
    assert max(r for (of, *_), r in rates.items() if of == k) > 0.96 * best


def test_a_weight_means_what_it_was_found_to_mean() -> None:
    calibration = Calibration()
    assert calibration.chance(0.95) > 0.9 > 0.6 > calibration.chance(0.5) > calibration.chance(0.01)
    for index in range(300):
        calibration.record(0.95, index % 4 == 0)
    assert calibration.chance(0.99) == pytest.approx(0.25, abs=0.02)
    for _ in range(2000):
        calibration.record(0.95, True)
    assert calibration.chance(0.99) > 0.95  # the past fades


def decode_with(policy: Policy, costs: Costs, accepted: float, n: int) -> tuple[int, float]:
    """Tokens and milliseconds of a text whose drafts are right with this chance."""
    rng, drafter, context, left = random.Random(1), AdaptiveDrafter([90], policy), [1], n
    ms = 0.0
    while left > 0:
        tree = drafter.propose(context, left)
        right = lambda node: tree.tokens[node] // 10 == 1  # noqa: E731, B023
        path = [0]
        for node in range(1, tree.probes_from):
            if tree.parents[node] == path[-1] and right(node):
                path.append(node)
        choice = 19
        k = len(tree.probes_of(path[-1]))
        ids = [[15 if rng.random() < accepted else 25, 35] for _ in range(k)]
        found = Candidates(ids, [[0.7, 0.1]] * k) if k else None
        ms += costs(len(tree.tokens))
        drafter.observe(tree, path, choice, found, len(tree.tokens))
        context.append(choice)
        left -= len(path)
    return n - left, ms


class Scripted(AutoPolicy):
    """Candidates of the tens are right here: the choice after a right one is not compared by id."""

    def learn(self, candidates, tokens, rows):
        if candidates:
            ids = [[token if i // 10 == 1 else i for i in row] for token, row in zip(tokens, candidates.ids)]
            ids += candidates.ids[len(tokens) :]
            candidates = Candidates(ids, candidates.weights)
        super().learn(candidates, tokens, rows)


@pytest.mark.parametrize(
    ("costs", "accepted", "least"),
    [(FLAT, 0.8, 2.8), (FLAT, 0.4, 1.5), (CPU, 0.8, 1.6), (CPU, 0.5, 1.2)],
    ids=["flat .8", "flat .4", "cpu .8", "cpu .5"],
)
def test_drafting_earns_what_it_can(costs: Costs, accepted: float, least: float) -> None:
    tokens, ms = decode_with(Scripted(costs, 5), costs, accepted, 2000)
    assert tokens / ms * costs(1) > least


@pytest.mark.parametrize(("costs", "accepted"), [(STEEP, 0.8), (CPU, 0.0), (CPU, 0.02), (STEEP, 0.0)])
def test_drafting_that_does_not_pay_costs_under_three_percent(costs: Costs, accepted: float) -> None:
    policy = Scripted(costs, 5)
    tokens, ms = decode_with(policy, costs, accepted, 2000)
    assert ms < 1.03 * tokens * costs(1)


RISING = Costs((1, 2, 4, 8, 16, 32, 64), (10.0, 11.5, 13.0, 17.0, 25.0, 41.0, 73.0))  # float32 on a CPU
JUMP = Costs((1, 2, 4, 8, 16, 32, 64), (10.0, 20.0, 20.5, 22.0, 25.0, 35.0, 60.0))  # 1.1B of the same


@pytest.mark.parametrize("costs", [FLAT, CPU, RISING, JUMP], ids=["flat", "cpu", "rising", "jump"])
@pytest.mark.parametrize("accepted", [0.6, 0.8, 0.9, 0.99])
def test_no_fixed_policy_is_much_better(costs: Costs, accepted: float) -> None:
    """k was bounded by the first plan's, and never grew: places that no probe had looked at were
    never bought. Where the second row costs as much as the first, no row was bought at all.
    """
    found = [
        decode_with(policy, costs, accepted, 2000)
        for policy in (
            *(FixedPolicy(k, probes) for k in (1, 2, 3, 5) for probes in ("root", "all")),
            Scripted(costs, 5),
        )
    ]
    *fixed, auto = [tokens / ms for tokens, ms in found]
    assert auto > 0.95 * max(*fixed, 1 / costs(1))


def test_the_price_of_a_row_is_that_on_the_way_to_more() -> None:
    assert slopes([10, 20, 20, 20, 25]) == pytest.approx([10 / 3, 0, 0, 5])
    assert slopes([1.0, 2.0, 4.0]) == [1.0, 2.0] and slopes([3.0]) == []


def test_an_unlucky_start_does_not_end_drafting() -> None:
    """After six drafts of which none was right, a text of 60 tokens was decoded plainly to its end."""
    policy = Scripted(CPU, 5)
    decode_with(policy, CPU, 0.0, 8)
    tokens, ms = decode_with(policy, CPU, 0.8, 60)
    assert tokens / ms * CPU(1) > 1.3


def test_a_text_that_becomes_predictable_is_drafted_again() -> None:
    policy = Scripted(CPU, 5)
    decode_with(policy, CPU, 0.0, 500)
    decode_with(policy, CPU, 0.8, 1000)
    tokens, ms = decode_with(policy, CPU, 0.8, 1000)
    assert tokens / ms * CPU(1) > 1.6


@pytest.mark.parametrize("weights", [[0.6, 0.3, 0.1], [0.5, 0.1, 0.05], [0.95, 0.5, 0.1]])
def test_in_a_batch_every_sequence_pays_for_the_rows_of_all(weights: list[float]) -> None:
    """Each was charged its own tree, but one's drafts and another's probes add up: drafting that cost
    a tenth was believed to pay.
    """
    rng, policy = random.Random(2), Scripted(RISING, 5)
    drafters = [AdaptiveDrafter([90], policy) for _ in range(8)]
    emitted, ms = 0, 0.0
    for _ in range(400):
        trees = [drafter.propose([1], 99) for drafter in drafters]
        rows = sum(extent(trees))
        ms += RISING(rows)
        for drafter, tree in zip(drafters, trees):
            path = [0]
            for node in range(1, tree.probes_from):
                if tree.parents[node] == path[-1] and tree.tokens[node] // 10 == 1:
                    path.append(node)
            emitted += len(path)
            k, weight = len(tree.probes_of(path[-1])), rng.choice(weights)
            ids = [[15 if rng.random() < weight else 25] for _ in range(k)]
            found = Candidates(ids, [[weight]] * k) if k else None
            drafter.observe(tree, path, 19, found, rows)
    assert ms < 1.03 * emitted / 8 * RISING(1)


def test_a_batch_may_have_more_rows_than_any_tree() -> None:
    """One tree had the most drafts and another the most probes, and their sum was looked up in a table
    of a tree's rows: an IndexError.
    """
    policy = AutoPolicy(CPU, 5)
    before = policy._credit._left
    policy.learn(None, [1], 2 * policy.max_rows)
    assert policy._credit._left == pytest.approx(before + CPU(1) - CPU(2 * policy.max_rows))


def test_more_probes_than_can_be_planned_are_not() -> None:
    """Plans took the cube of k: seconds each at k = 512, and hours before the first token at k = 10,000."""
    policy = AutoPolicy(CPU, 10_000)
    assert (policy.most, policy.max_rows) == (MOST, 1 + MOST) and 1 <= policy.k <= MOST
    assert AutoPolicy(CPU, MOST).k == policy.k
