"""L(q): straight lines between points, and how the clock corrects it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.drafters.costs import (
    LEARNED,
    ROWS,
    CostCurve,
    Costs,
    LoopCosts,
    clipped,
    prior_costs,
    rising,
)

CPU = Costs((1, 2, 4, 8, 16, 32, 64), (10.0, 10.0, 10.5, 11.5, 14.0, 19.0, 30.0))


@given(st.integers(1, 80))
def test_costs_lie_on_straight_lines(q: int) -> None:
    assert CPU(q) == pytest.approx(
        10.0
        if q <= 2
        else 9.5 + q / 4
        if q <= 8
        else 9.0 + 5 * q / 16
        if q <= 32
        else 8.0 + 11 * q / 32
    )


@given(st.sampled_from(ROWS[1:]), st.floats(0.2, 5))
def test_points_that_no_step_came_near_move_along(q: int, factor: float) -> None:
    """The true table is the prior with another price of rows: one number of rows teaches it as a whole."""
    prior = prior_costs("cpu")
    curve = CostCurve(prior, base=True)
    truth = Costs(ROWS, tuple(1 + factor * (ms - 1) for ms in prior.ms))
    for _ in range(60):
        curve.learn(q, clipped(truth(q) / curve.costs(q)))
    assert curve.costs(1) == 1.0
    assert curve.costs.ms == pytest.approx(truth.ms, rel=0.25)


def test_points_that_many_steps_met_hardly_move() -> None:
    curve = CostCurve(CPU)
    curve.learn(8, 1.0)
    moved = [after / before for before, after in zip(CPU.ms, curve.costs.ms)]
    assert moved == pytest.approx([1, 1, 1, 1 + LEARNED, 1, 1, 1], abs=0.005)


def test_a_slow_first_step_makes_no_row_dear_for_good() -> None:
    """A new shape took twice as long. All rows beyond it cost as much then, none more: 64 were bought."""
    curve = CostCurve(prior_costs("cpu"), base=True)
    for q in (12, 12, 16, 20):
        curve.learn(q, 0.0)
    curve.learn(8, 1.0)
    assert list(curve.costs.ms) == sorted(curve.costs.ms)
    assert curve.costs(8) < 1.3 * prior_costs("cpu")(8) and curve.costs(
        64
    ) > 1.5 * curve.costs(16)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 9)), min_size=1, max_size=9)
)
def test_costs_never_fall(points: list[tuple[float, float]]) -> None:
    """Isotonic regression: no other rising sequence lies nearer, weighted."""
    values, weights = zip(*points)
    n = len(points)

    def mean(i: int, j: int) -> float:
        return sum(v * w for v, w in points[i : j + 1]) / sum(weights[i : j + 1])

    expected = [
        max(min(mean(i, j) for j in range(x, n)) for i in range(x + 1))
        for x in range(n)
    ]
    assert rising(values, weights) == pytest.approx(expected)


def test_the_clock_of_plain_steps_is_the_unit() -> None:
    """A machine that is three times as slow changes no ratio."""
    costs = LoopCosts(CPU, 64)
    assert costs.in_units(5.0) is None
    for _ in range(5):
        assert costs.observe(1, 30.0) == 1.0
    assert costs.in_units(60.0) == pytest.approx(20.0)
    for _ in range(100):
        assert costs.observe(16, 42.0) == pytest.approx(1.4)
    assert costs(16) == pytest.approx(14.0) and costs.costs.ms == pytest.approx(CPU.ms)
