"""What is learned of costs, within a process and between two: kept by the texts and the work there is."""

import os
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from infer.api import generate, load
from infer.config import DecodeConfig
from infer.drafters import auto
from infer.drafters.auto import MOST, Policies
from infer.drafters.cost_tables import WEIGHT, CostTables
from infer.drafters.costs import Costs, prior_costs
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Verified
from infer.trees.tree import Tree
from tests.conftest import tiny_llama

COSTS = Costs((1, 64), (1.0, 2.0))
LEARNED = Costs((1, 2, 64), (2.0, 3.0, 8.0), (0.0, 99.0, 1.0))


def tables(
    sampling: Sampling = GREEDY,
    *,
    batch: int = 1,
    capacity: int = 100,
    draft: bool = False,
) -> CostTables:
    lm = tiny_llama()
    return CostTables(
        lm,
        tiny_llama(seed=1) if draft else None,
        batch=batch,
        capacity=capacity,
        sampling=sampling,
    )


def test_what_was_learned_is_read_in_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_draft_model_has_a_table_beside_its_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the target's plain steps: the draft model of as many layers is as dear, by what is known at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables(draft=True).load() == [prior_costs("cpu")] * 2
    tables(draft=True).save(LEARNED, Costs((1, 64), (0.5, 1.0), (1.0, 1.0)))
    assert [item.ms for item in tables(draft=True).load()] == [
        (1.0, 1.5, 4.0),
        (0.25, 0.5),
    ]


def test_a_user_without_a_home_keeps_no_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither environment nor system knew a home, as in a container, they went into ./~/.cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    tables().save(LEARNED)
    assert tables().load() == [prior_costs("cpu")] and not list(tmp_path.iterdir())


def test_every_way_of_choosing_has_a_table_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampled row was weighed with the greedy one's costs. The temperature changes nothing of the work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ways = [
        GREEDY,
        Sampling(1.0),
        Sampling(1.0, 10),
        Sampling(1.0, 50),
        Sampling(1.0, 0, 0.9),
    ]
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
    monkeypatch.setattr(
        auto, "SAVED", (1, 4)
    )  # on a busy machine drafting may rest before the sixteenth step
    texts = []
    for _ in range(2):
        model = load(model_dir, "float32")
        texts.append(
            [
                step.tokens
                for step in generate(
                    model, [5, 17, 3], DecodeConfig(max_new_tokens=120)
                )
            ]
        )
    assert [token for step in texts[0] for token in step] == [
        token for step in texts[1] for token in step
    ]
    assert len(list(tmp_path.rglob("costs-*.json"))) == 1


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
    texts = list(product((2, 3), (1, 2), (100, 2000), ways))
    result = [
        [
            auto(k, frozenset(), batch=batch, capacity=n, sampling=way)
            for k, batch, n, way in texts
        ]
        for _ in range(2)
    ]
    assert result[0] == result[1] and len(set(map(id, result[0]))) == len(texts)
    assert len(loaded) == 4 * 4  # greedy, sampled, by top_k, by top_p: whatever k is


def test_no_more_are_kept_than_there_is_room_for() -> None:
    """A service that takes any temperature would have kept a policy of each for good."""
    policies = Policies()
    auto = partial(
        policies.auto, 3, frozenset(), batch=1, capacity=100, load=lambda: [COSTS]
    )
    first = auto(sampling=Sampling(1.0))
    second = auto(sampling=Sampling(2.0))
    for number in range(MOST - 1):
        auto(sampling=Sampling(3.0 + number))
        assert auto(sampling=Sampling(1.0)) is first
    assert auto(sampling=Sampling(2.0)) is not second


def test_a_new_policy_begins_with_what_another_learned() -> None:
    policies = Policies()
    auto = partial(policies.auto, sources=frozenset(), batch=1, capacity=100)
    first = auto(3, sampling=Sampling(1.0), load=lambda: [prior_costs("cpu")])
    for rows in [1] * 4 + [8] * 40:
        first.learn(None, Verified(Tree.chain(0), [0], 1, None, rows, 0.01 * rows))
    second = auto(5, sampling=Sampling(0.5), load=list)
    assert second.tables == first.tables and second.tables[0](8) > 3
