"""Tables of costs: measured once, kept apart, and on one scale."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from infer.api import Model, generate
from infer.config import DecodeConfig
from infer.drafters.cost_tables import find_both, find_costs
from infer.drafters.costs import Bench, Costs, LoopCosts
from infer.engine.sampling import GREEDY, Sampling
from infer.methods import Methods
from infer.models.checkpoint import Adaptive
from tests.conftest import tiny_llama
from tests.infer.engine.test_families import tiny


def test_costs_are_measured_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clock was set back by a year, a table was kept for a year and a week."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("infer.drafters.costs.SECONDS", 0.2)
    lm = tiny_llama()
    found = find_costs(lm, batch=2, capacity=100, sampling=GREEDY)
    assert found.rows[0] == 1 and list(found.ms) == sorted(found.ms) and found.ms[0] > 0
    monkeypatch.setattr("infer.drafters.cost_tables.measure_costs", None)
    assert find_costs(lm, batch=2, capacity=120, sampling=GREEDY) == found
    (path,) = tmp_path.rglob("*.json")
    old = path.stat().st_mtime - 8 * 24 * 3600
    os.utime(path, (old, old))
    with pytest.raises(TypeError):  # measured anew after a week,
        find_costs(lm, batch=2, capacity=100, sampling=GREEDY)
    later = path.stat().st_mtime + 365 * 24 * 3600
    os.utime(path, (later, later))
    with pytest.raises(TypeError):  # where the clock was set back since,
        find_costs(lm, batch=2, capacity=100, sampling=GREEDY)
    path.write_text("{")
    with pytest.raises(TypeError):  # and where the file is damaged
        find_costs(lm, batch=2, capacity=100, sampling=GREEDY)


def test_a_user_without_a_home_keeps_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither environment nor system knew a home, as in a container, they went into ./~/.cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(
        "infer.drafters.cost_tables.measure_costs", lambda lm, **kwargs: Costs((1, 2), (1.0, 2.0))
    )
    assert find_costs(tiny_llama(), batch=1, capacity=100, sampling=GREEDY).ms == (1.0, 2.0)
    assert not list(tmp_path.iterdir())


def test_every_way_of_choosing_has_a_table_of_its_own(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampled row was weighed with the greedy one's costs. How warm it is, changes nothing of the work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured, lm = list[Sampling](), tiny_llama()

    def measure(lm, *, sampling: Sampling, **kwargs) -> Costs:
        measured.append(sampling)
        return Costs((1, 2), (1.0, float(len(measured))))

    monkeypatch.setattr("infer.drafters.cost_tables.measure_costs", measure)
    ways = [GREEDY, Sampling(1.0), Sampling(1.0, 10), Sampling(1.0, 50), Sampling(1.0, 0, 0.9)]
    tables = [find_costs(lm, batch=1, capacity=100, sampling=way) for way in ways]
    assert measured == ways and len(set(tables)) == len(ways)
    warmer = [GREEDY, *(replace(way, temperature=0.3) for way in ways[1:])]
    assert [find_costs(lm, batch=1, capacity=100, sampling=way) for way in warmer] == tables
    assert find_costs(lm, batch=1, capacity=100, sampling=Sampling(1.0, 0, 0.5)) == tables[-1]
    assert measured == ways


def test_auto_rests_where_the_table_of_its_sampling_says_so(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, steep = Costs((1, 64), (10.0, 10.0)), Costs((1, 64), (10.0, 640.0))
    monkeypatch.setattr(
        "infer.methods.find_costs", lambda lm, *, sampling, **kwargs: steep if sampling.temperature else flat
    )
    # The clock would say at once what steps of this machine really cost.
    monkeypatch.setattr(LoopCosts, "observe", lambda self, q, ms, answered=False: self(q) / self(1))
    methods, rows = Methods(model.lm, model.adaptive), dict[float, list[int]]()
    for temperature in (0.0, 1.0):
        decode = DecodeConfig(temperature=temperature, max_new_tokens=60)
        steps = list(generate(replace(model, methods=methods), [5, 17, 3], decode))
        rows[temperature] = [step.rows for step in steps]
    assert sum(more > 1 for more in rows[0.0]) > 0.9 * len(rows[0.0])
    assert sum(more > 1 for more in rows[1.0]) < 10  # the first credit


def test_costs_are_measured_where_the_model_has_positions(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 columns were too many for a table of 128 positions: an IndexError of PyTorch's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("infer.drafters.costs.SECONDS", 0.2)
    lm = tiny("opt", max_position_embeddings=128, ffn_dim=64)
    assert find_costs(lm, batch=1, capacity=100, sampling=GREEDY).ms[0] > 0


def test_a_home_that_cannot_be_written_costs_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text measured again, and what the last one had taught was forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr("infer.drafters.costs.SECONDS", 0.1)
    methods = Methods(tiny_llama(), Adaptive((90,), 3))
    policies = [
        methods.drafters(DecodeConfig(), batch=1, capacity=100 + n, left=99)._new()._policy for n in range(2)
    ]
    assert policies[0] is policies[1]


def test_a_draft_models_costs_are_on_the_scale_of_its_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two tables come from other moments: one was measured while the machine did something else, and a
    draft model that paid was never asked.
    """
    target, draft = tiny_llama(), tiny_llama(seed=1)
    tables = {id(target): Costs((1, 8), (10.0, 20.0)), id(draft): Costs((1, 8), (9.0, 18.0))}
    monkeypatch.setattr("infer.drafters.cost_tables.find_costs", lambda lm, **kwargs: tables[id(lm)])
    monkeypatch.setattr(Bench, "burst", lambda self, q: 0.004 if self._lm is target else 0.001)
    found = find_both(target, draft, batch=1, capacity=100, sampling=Sampling(1.0))
    assert found == (tables[id(target)], Costs((1, 8), (2.5, 5.0)))
    monkeypatch.undo()
    assert Bench(draft, batch=2, context=256, sampling=Sampling(1.0, top_p=0.9), drafts=True).step(2) > 0
