"""Tables of costs between two processes: written, read, kept apart."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from infer.api import Model, generate, load
from infer.config import DecodeConfig
from infer.drafters import auto
from infer.drafters.cost_tables import WEIGHT, CostTables
from infer.drafters.costs import Costs, LoopCosts, prior_costs
from infer.engine.sampling import GREEDY, Sampling
from infer.methods import Methods
from infer.models.checkpoint import Adaptive
from tests.conftest import tiny_llama

LEARNED = Costs((1, 2, 64), (2.0, 3.0, 8.0), (0.0, 99.0, 1.0))


def tables(
    sampling: Sampling = GREEDY, *, batch: int = 1, capacity: int = 100, draft: bool = False
) -> CostTables:
    lm = tiny_llama()
    return CostTables(
        lm, tiny_llama(seed=1) if draft else None, batch=batch, capacity=capacity, sampling=sampling
    )


def test_what_was_learned_is_read_in_plain_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lengths of a class read the same; what is damaged is a prior again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables().load() == [prior_costs("cpu")]
    tables().save(LEARNED)
    expected = [Costs((1, 2, 64), (1.0, 1.5, 4.0), (0.0, WEIGHT, 1.0))]
    assert tables().load() == tables(capacity=120).load() == expected
    for other in (tables(batch=2), tables(capacity=2000), tables(draft=True)):
        assert other.load()[0] == prior_costs("cpu")
    (path,) = tmp_path.rglob("*.json")
    path.write_text("{")
    assert tables().load() == [prior_costs("cpu")]


def test_a_draft_model_has_a_table_beside_its_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the target's plain steps: the draft model of as many layers is as dear, by what is known at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables(draft=True).load() == [prior_costs("cpu")] * 2
    tables(draft=True).save(LEARNED, Costs((1, 64), (0.5, 1.0), (1.0, 1.0)))
    assert [item.ms for item in tables(draft=True).load()] == [(1.0, 1.5, 4.0), (0.25, 0.5)]


def test_a_user_without_a_home_keeps_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither environment nor system knew a home, as in a container, they went into ./~/.cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    tables().save(LEARNED)
    assert tables().load() == [prior_costs("cpu")] and not list(tmp_path.iterdir())


def test_every_way_of_choosing_has_a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampled row was weighed with the greedy one's costs. The temperature changes nothing of the work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ways = [GREEDY, Sampling(1.0), Sampling(1.0, 10), Sampling(1.0, 50), Sampling(1.0, 0, 0.9)]
    for number, way in enumerate(ways):
        tables(way).save(replace(LEARNED, ms=(1.0, 2.0, 3.0 + number)))
    read = [tables(way).load()[0].ms[2] for way in ways]
    assert read == [3.0 + number for number in range(len(ways))]
    warmer = [GREEDY, *(replace(way, temperature=0.3) for way in ways[1:])]
    assert [tables(way).load()[0].ms[2] for way in warmer] == read
    assert tables(Sampling(1.0, 0, 0.5)).load()[0].ms[2] == read[-1]


def test_a_second_process_begins_with_what_the_first_learned(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "SAVED", (1, 4))  # on a busy machine drafting may rest before the sixteenth step
    texts = []
    for _ in range(2):
        model = load(model_dir, "float32")
        texts.append([step.tokens for step in generate(model, [5, 17, 3], DecodeConfig(max_new_tokens=120))])
    assert [token for step in texts[0] for token in step] == [token for step in texts[1] for token in step]
    assert len(list(tmp_path.rglob("costs-*.json"))) == 1


def test_auto_rests_where_the_table_of_its_sampling_says_so(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, steep = Costs((1, 64), (10.0, 10.0)), Costs((1, 64), (10.0, 640.0))
    monkeypatch.setattr(CostTables, "load", lambda self: [steep if self._texts[2][0] else flat])
    # The clock would say at once what steps of this machine really cost.
    monkeypatch.setattr(LoopCosts, "observe", lambda self, q, ms, answered=False: self(q) / self(1))
    methods, rows = Methods(model.lm, model.adaptive), dict[float, list[int]]()
    for temperature in (0.0, 1.0):
        decode = DecodeConfig(temperature=temperature, max_new_tokens=60)
        steps = list(generate(replace(model, methods=methods), [5, 17, 3], decode))
        rows[temperature] = [step.rows for step in steps]
    assert sum(more > 1 for more in rows[0.0]) > 0.9 * len(rows[0.0])
    assert sum(more > 1 for more in rows[1.0]) < 10  # the first credit


def test_a_home_that_cannot_be_written_loses_nothing_within_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text measured again, and what the last one had taught was forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    tables().save(LEARNED)
    methods = Methods(tiny_llama(), Adaptive((90,), 3))
    policies = [
        methods.drafters(DecodeConfig(), batch=1, capacity=100 + n, left=99)._new()._policy for n in range(2)
    ]
    assert policies[0] is policies[1]
