from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from data_prep.shards import Shards
from tests.conftest import vocab_of
from train.config import ObjectiveConfig, OptimizerConfig, TrainConfig, TrainDataConfig
from train.data import (
    TrainingData,
    global_order,
    lay_out,
    rank_batches,
)
from train.objective import IGNORE
from train.schedule import Schedule, learning_rate


@given(st.integers(1, 20), st.integers(0, 50), st.integers(1, 50))
def test_the_order_is_a_permutation_in_every_epoch(
    count: int, start: int, length: int
) -> None:
    whole = global_order(3, count, 0, start + length)
    assert np.array_equal(global_order(3, count, start, length), whole[start:])
    for epoch in range(len(whole) // count):
        assert sorted(whole[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_the_ranks_batches_make_up_the_global_batch() -> None:
    order = global_order(0, 100, 0, 12)
    for ranks, micro in [(1, 12), (2, 3), (3, 2), (6, 1)]:
        batches = [
            batch
            for rank in range(ranks)
            for batch in rank_batches(order, rank=rank, ranks=ranks, micro_batch=micro)
        ]
        assert sorted(np.concatenate(batches)) == sorted(order)


def own_text(folder: Path, *, share: float, batch: int, seed: int = 0) -> TrainConfig:
    data = TrainDataConfig(str(folder), own=str(folder), own_share=share)
    objective = ObjectiveConfig("branch")
    return TrainConfig(data=data, objective=objective, global_batch=batch, seed=seed)


@given(
    seed=st.integers(0, 9),
    batch=st.integers(2, 24),
    share=st.floats(0.01, 0.99),
    step=st.integers(0, 200),
)
def test_own_text_has_its_share_of_every_step(
    data_folder: Path, seed: int, batch: int, share: float, step: int
) -> None:
    """Each part of a step continues its own order, which depends on the step alone."""
    own_count = round(share * batch)
    assume(0 < own_count < batch)
    human = batch - own_count
    data = TrainingData(own_text(data_folder, share=share, batch=batch, seed=seed))
    size, order = len(data.human), data.order(step)
    assert np.array_equal(order[:human], global_order(seed, size, step * human, human))
    assert np.array_equal(
        order[human:] - size, global_order(seed, size, step * own_count, own_count)
    )
    last = int(order[-1])
    assert np.array_equal(data[last].tokens, data.human[last - size].tokens)


def test_own_text_counts_for_drafts_alone(data_folder: Path) -> None:
    """In a step, the standard term is the mean over the tokens of data.path only."""
    config = own_text(data_folder, share=0.4, batch=8)
    data, vocab = TrainingData(config), vocab_of(data_folder)
    sums = []
    for part in rank_batches(data.order(3), rank=0, ranks=1, micro_batch=2):
        layout = lay_out(
            [data[int(index)] for index in part],
            part,
            vocab,
            config.objective,
            seed=(0,),
            standard=data.standard(part),
        )
        n = layout.trunk
        is_own = part >= len(data.human)
        assert (layout.labels[is_own, :n] == IGNORE).all()
        assert ((layout.offsets[is_own] > 0).any(axis=1)).all()
        assert len(np.unique(layout.weights[:, n:])) == 1
        replaced = np.take_along_axis(layout.ids, layout.positions, 1)
        assert not np.isin(replaced[layout.offsets > 0], list(vocab.control)).any()
        sums += layout.weights[:, :n].sum(axis=1).tolist()
    # 5 of 8 sequences share the standard half of eq. 9; a micro-batch has two rows.
    assert sums == pytest.approx([8 / 5 / 2 / 2] * 5 + [0] * 3)


def test_a_sequences_windows_do_not_depend_on_its_batch(data_folder: Path) -> None:
    shards, vocab = Shards(data_folder, "train"), vocab_of(data_folder)

    def lay(*rows: int, step: int) -> np.ndarray:
        sequences = [shards[row] for row in rows]
        return lay_out(sequences, rows, vocab, ObjectiveConfig(), seed=(0, step)).ids

    alone = lay(7, step=5)[1]
    assert np.array_equal(lay(3, 7, step=5)[3], alone)
    assert not np.array_equal(lay(7, step=6)[1], alone)


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    config = OptimizerConfig()
    rates = [learning_rate(step, Schedule(2000), config) for step in range(2000)]
    assert rates[0] == pytest.approx(5e-5 / 400)
    assert max(rates) == pytest.approx(5e-5) == rates[400]
    assert rates[-1] == pytest.approx(1e-5)
    assert rates[400:] == sorted(rates[400:], reverse=True)
