import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.shards import Shards
from data_prep.vocab import Vocab
from data_prep.windows import sample_windows
from train.config import ObjectiveConfig, OptimizerConfig, TrainConfig, TrainDataConfig
from train.data import (
    TrainingData,
    draw_windows,
    global_order,
    lay_out,
    rank_batches,
)
from train.objective import IGNORE
from train.trainer import learning_rate


@given(st.integers(1, 20), st.integers(0, 50), st.integers(1, 50))
def test_the_order_is_one_endless_sequence_of_permutations(
    count: int, start: int, length: int
) -> None:
    whole = global_order(3, count, 0, start + length)
    assert np.array_equal(global_order(3, count, start, length), whole[start:])
    for epoch in range(len(whole) // count):
        assert sorted(whole[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_ranks_share_a_global_batch_without_changing_it() -> None:
    order = global_order(0, 100, 0, 12)
    for ranks, micro in [(1, 12), (2, 3), (3, 2), (6, 1)]:
        parts = [
            rank_batches(order, rank=r, ranks=ranks, micro_batch=micro)
            for r in range(ranks)
        ]
        assert sorted(np.concatenate([b for part in parts for b in part])) == sorted(
            order
        )


@pytest.fixture
def vocab(data_folder: Path) -> Vocab:
    return Vocab.from_json(
        json.loads((data_folder / "manifest.json").read_text())["vocab"]
    )


def own_text(
    folder: Path, share: float, *, objective: str = "branch", batch: int = 8
) -> TrainConfig:
    data = TrainDataConfig(str(folder), own=str(folder), own_share=share)
    return TrainConfig(
        data=data, objective=ObjectiveConfig(objective), global_batch=batch
    )


@given(
    seed=st.integers(0, 9),
    batch=st.integers(2, 24),
    share=st.floats(0.01, 0.99),
    step=st.integers(0, 200),
)
def test_own_text_has_its_share_of_every_step(
    data_folder: Path, seed: int, batch: int, share: float, step: int
) -> None:
    """Both parts of a step go on in their own endless order, whatever steps were taken
    before.
    """
    count = round(share * batch)
    if not 0 < count < batch:
        with pytest.raises(
            ValueError,
            match=r"data\.own_share must give a step sequences of both kinds",
        ):
            own_text(data_folder, share, batch=batch)
        return
    data = TrainingData(replace(own_text(data_folder, share, batch=batch), seed=seed))
    size, order = len(data.human), data.order(step)
    assert len(data) == 2 * size and data.human_sequences == batch - count
    assert np.array_equal(
        order[:-count], global_order(seed, size, step * (batch - count), batch - count)
    )
    assert np.array_equal(
        order[-count:] - size, global_order(seed, size, step * count, count)
    )
    assert np.array_equal(
        data[int(order[-1])].tokens, data.human[int(order[-1]) - size].tokens
    )
    factors = data.standard(order)
    assert (
        factors is not None
        and (factors[-count:] == 0).all()
        and factors.sum() == pytest.approx(batch)
    )


def test_own_text_counts_for_drafts_alone(data_folder: Path, vocab: Vocab) -> None:
    """Over a step's micro-batches the standard term is the mean over the tokens of
    data.path.
    """
    config = own_text(data_folder, 0.4)
    data = TrainingData(config)
    order, totals = data.order(3), np.zeros(8)
    for part, rows in zip(
        rank_batches(order, rank=0, ranks=1, micro_batch=2), np.split(np.arange(8), 4)
    ):
        sequences = [data[int(index)] for index in part]
        layout, plain = (
            lay_out(
                sequences, part, vocab, config.objective, seed=(0,), standard=standard
            )
            for standard in (data.standard(part), None)
        )
        n = layout.trunk
        own = part >= len(data.human)
        assert (layout.labels[own, :n] == IGNORE).all()
        assert np.array_equal(layout.labels[~own, :n], plain.labels[~own, :n])
        drafts = layout.offsets[own] > 0
        assert (
            drafts.any() == own.any()
            and (layout.labels[own][drafts] != vocab.eos).all()
        )
        assert (layout.teachers[own][drafts] >= 0).all()
        both = min(layout.ids.shape[1], plain.ids.shape[1])
        assert np.array_equal(layout.labels[~own, n:both], plain.labels[~own, n:both])
        assert np.allclose(layout.weights[:, n:], plain.weights[0, n])
        totals[rows] = layout.weights[:, :n].sum(1)
    expected = [8 / 5 / 2 / 2] * 5 + [
        0
    ] * 3  # of eq. 9's half, for each of a micro-batch's two rows
    assert totals == pytest.approx(expected)


def test_a_sequences_windows_do_not_depend_on_its_batch(
    data_folder: Path, vocab: Vocab
) -> None:
    shards, objective = Shards(data_folder, "train"), ObjectiveConfig()
    both = lay_out([shards[3], shards[7]], [3, 7], vocab, objective, seed=(0, 0, 5))
    alone = lay_out([shards[7]], [7], vocab, objective, seed=(0, 0, 5))
    assert np.array_equal(both.ids[3], alone.ids[1])
    other = lay_out([shards[7]], [7], vocab, objective, seed=(0, 0, 6))
    assert not np.array_equal(other.ids[1], alone.ids[1])


@pytest.mark.parametrize("diverse", [False, True])
def test_windows_stay_off_control_tokens_padding_and_borders(
    data_folder: Path, vocab: Vocab, diverse: bool
) -> None:
    shards = Shards(data_folder, "train")
    objective = ObjectiveConfig(start_rate=0.5, diverse=diverse)
    rows = list(range(len(shards)))
    layout = lay_out([shards[i] for i in rows], rows, vocab, objective, seed=(0,))
    b = len(rows)
    Y, M, offsets, labels = (
        layout.ids[:b],
        layout.ids[b:],
        layout.offsets[b:],
        layout.labels[b:],
    )
    documents = np.stack([shards[i].documents for i in rows])
    assert (M[offsets == 0] == Y[offsets == 0]).all()
    assert not np.isin(Y[offsets > 0], list(vocab.control)).any()
    assert (documents[offsets > 0] >= 0).all()
    assert ((labels != IGNORE) <= (offsets > 0)).all()
    expected = np.array(objective.adaptive_ids(vocab.adaptive))
    if diverse:
        assert offsets.max() == objective.L
        assert (M[offsets > 0] == expected[offsets[offsets > 0] - 1]).all()
    else:
        assert (M[offsets > 0] == expected[0]).all()


def test_wide_windows_change_no_draw_where_they_are_off() -> None:
    """Old runs must go on with the bytes that they began with."""
    off = draw_windows(5000, ObjectiveConfig(name="branch", L=5), seed=(0, 1))
    plain = sample_windows(
        5000, L=5, start_rate=0.1, generator=np.random.default_rng((0, 1))
    )
    assert all(np.array_equal(a, b) for a, b in zip(off, plain, strict=True))
    on = draw_windows(
        5000, ObjectiveConfig(name="branch", L=5, wide_share=0.2, L_max=9), seed=(0, 1)
    )
    assert np.array_equal(on[0], plain[0]) and on[1].max() == 9
    assert 0.12 < (on[1] > 5).mean() < 0.28


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    config = OptimizerConfig()
    rates = [learning_rate(step, 2000, config) for step in range(2000)]
    assert rates[0] == pytest.approx(5e-5 / 400)
    assert max(rates) == pytest.approx(5e-5) and rates.index(max(rates)) in (399, 400)
    assert rates[-1] == pytest.approx(1e-5)
    assert all(a >= b for a, b in zip(rates[400:], rates[401:]))
