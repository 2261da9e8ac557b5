"""L(q) as reports measure it: what is timed, and what is left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.drafters.costs import ROWS
from infer.engine.pick import candidates, pick
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.speed.profile import StepTimer, context_for, measure_costs, rising
from tests.conftest import tiny_llama
from tests.infer.engine.test_families import tiny


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_noise_is_smoothed_to_costs_that_never_fall(values: list[float]) -> None:
    """Isotonic regression: no other rising sequence lies nearer."""
    result = rising(values)
    wanted = [
        max(min(sum(values[i : j + 1]) / (j + 1 - i) for j in range(x, len(values))) for i in range(x + 1))
        for x in range(len(values))
    ]
    assert result == pytest.approx(wanted)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(1.0, 10, 0.9)])
def test_a_table_is_measured_with_the_texts_own_choices(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were measured greedily: of sampled text the drafts take several times as long to read, and drafting
    that lost a sixth was believed to pay.
    """
    picked, read = list[Sampling](), list[Sampling]()
    monkeypatch.setattr("infer.speed.profile.SECONDS", 0.05)
    monkeypatch.setattr(
        "infer.engine.reading.pick", lambda logits, how, *keys: picked.append(how) or pick(logits, how, *keys)
    )
    monkeypatch.setattr(
        "infer.engine.reading.candidates",
        lambda logits, how, *keys: read.append(how) or candidates(logits, how, *keys),
    )
    found = measure_costs(tiny_llama(), batch=2, context=128, sampling=sampling)
    assert set(picked) == set(read) == {sampling}
    assert found.rows[0] == 1 and found.ms[0] > 0 and list(found.ms) == sorted(found.ms)


class Hands:
    """A clock that others advance."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def after(self, seconds: float, work):
        def timed(*args, **kwargs):
            self.time += seconds
            return work(*args, **kwargs)

        return timed


@pytest.mark.parametrize(
    ("sampling", "left"),
    [(GREEDY, 15.0), (Sampling(1.0, top_k=5), 15.0), (Sampling(1.0), 10.0), (Sampling(0.5, top_p=0.9), 10.0)],
)
def test_picks_that_are_paid_for_by_the_token_are_in_no_table(
    sampling: Sampling, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a pick looks at all tokens it is made for the path alone: plain decoding makes as many."""
    hands, bench = Hands(), StepTimer(tiny_llama(), batch=1, context=128, sampling=sampling)
    bench._clock = hands
    monkeypatch.setattr("infer.engine.reading.pick", hands.after(5.0, pick))
    monkeypatch.setattr(Runner, "forward", hands.after(10.0, Runner.forward))
    assert bench.step(1) == pytest.approx(left)
    monkeypatch.setattr("infer.engine.reading.candidates", hands.after(3.0, candidates))
    assert bench.step(4) == pytest.approx(left + 3.0)


def test_fixed_shapes_of_all_rows_have_the_same_columns() -> None:
    """From 48 rows on a forward was measured over more columns of the cache: `auto` found its rows too dear."""
    bench = StepTimer(tiny_llama(), batch=1, context=256, static=True)
    for q in ROWS:
        bench.step(q)
    assert {shape.columns for shape in bench._runner._forward._graphs[GREEDY]} == {256}  # type: ignore[attr-defined]


def test_costs_are_measured_where_the_model_has_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 columns were too many for a table of 128 positions: an IndexError of PyTorch's."""
    monkeypatch.setattr("infer.speed.profile.SECONDS", 0.2)
    lm = tiny("opt", max_position_embeddings=128, ffn_dim=64)
    assert measure_costs(lm, batch=1, context=context_for(100, lm), sampling=GREEDY).ms[0] > 0
