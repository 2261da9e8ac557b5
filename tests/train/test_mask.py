"""Test objective.mask: noise or an existing token instead of adaptive ids in windows."""

from pathlib import Path

import numpy as np
import pytest
import torch

from conf.errors import UserError
from data_prep.shards import Shards
from tests.conftest import vocab_of
from train.config import LoraSettings, ObjectiveConfig, TrainConfig
from train.data import HELD_OUT, TRAINING, lay_out
from train.objective import Layout, branch, with_noise
from train.pretrained import load_trainable, model_config
from train.spec import read_spec
from train.validation import stretch

V = 400
SEED = (3, TRAINING, 7)


def layout_of(
    folder: Path, mask: str, indices: list[int], *, name: str = "branch", **more: object
) -> Layout:
    shards = Shards(folder, "train")
    settings: dict[str, object] = {"seed": SEED, "vocabulary": V} | more
    objective = ObjectiveConfig(name, mask=mask, start_rate=0.3)
    sequences = [shards[index] for index in indices]
    return lay_out(sequences, indices, vocab_of(folder), objective, **settings)  # type: ignore[arg-type]


def test_noise_is_as_drawn_in_with_noise() -> None:
    """Noise replaces only the ids of windows."""
    tokens = np.array([[2, 3, 4, 5]])
    windows = [(np.array([1, 3]), np.array([2, 1]))]
    everywhere = np.ones_like(tokens, dtype=bool)
    layout = branch(
        tokens, np.zeros_like(tokens), windows, everywhere, (9,), multiple=1
    )
    noise = np.array([[30, 31, 32, 33, 40, 41]])
    assert layout.ids.tolist() == [[2, 3, 4, 5, 9, 9]]
    result = with_noise(layout, noise)
    assert result.ids.tolist() == [[2, 3, 4, 5, 40, 41]]
    assert np.array_equal(result.labels, layout.labels)


@pytest.mark.parametrize("name", ["branch", "dual", "basic"])
def test_the_mask_changes_only_the_ids_of_windows(data_folder: Path, name: str) -> None:
    indices = [4, 1, 3]
    layouts = {
        mask: layout_of(data_folder, mask, indices, name=name)
        for mask in ("adaptive", "noise", "17")
    }
    adaptive = layouts["adaptive"]
    windows = adaptive.offsets > 0
    assert windows.sum() > 40
    for mask, layout in layouts.items():
        for part in ("labels", "offsets", "positions", "weights", "teachers"):
            assert np.array_equal(getattr(layout, part), getattr(adaptive, part)), mask
        assert np.array_equal(layout.ids[~windows], adaptive.ids[~windows])
    assert {*layouts["17"].ids[windows]} == {17}
    noise = layouts["noise"].ids[windows]
    assert noise.min() >= 0 and noise.max() < V
    assert len({*noise}) > len(noise) / 3


@pytest.mark.parametrize("name", ["branch", "dual"])
def test_noise_is_a_function_of_seed_step_sequence_and_column(
    data_folder: Path, name: str
) -> None:
    """So a resumed run, other micro-batches and other ranks train on the same ids."""
    indices = [4, 1, 3]
    whole = layout_of(data_folder, "noise", indices, name=name)
    again = layout_of(data_folder, "noise", indices, name=name)
    assert np.array_equal(whole.ids, again.ids)
    for place, index in enumerate(indices):
        alone = layout_of(data_folder, "noise", [index], name=name)
        for row in range(len(alone.ids)):
            ids, expected = alone.ids[row], whole.ids[row * len(indices) + place]
            windows = alone.offsets[row] > 0
            assert np.array_equal(ids[windows], expected[: len(ids)][windows])
    for seed in ((4, TRAINING, 7), (3, TRAINING, 8)):
        other = layout_of(data_folder, "noise", indices, name=name, seed=seed)
        assert not np.array_equal(
            whole.ids[whole.offsets > 0], other.ids[other.offsets > 0]
        )


def test_overlapping_windows_have_different_noise(data_folder: Path) -> None:
    """Validation has a window at each position; several windows have rows at one position."""
    seed = (3, HELD_OUT)
    layout = layout_of(data_folder, "noise", [0], seed=seed, draw=stretch)
    positions = layout.positions[0]
    windows = layout.offsets[0] > 0
    position = int(positions[windows][len(positions[windows]) // 2])
    ids = layout.ids[0][windows & (positions == position)]
    assert len(ids) == 5 and len({*ids.tolist()}) > 2


def test_noise_is_uniform(data_folder: Path) -> None:
    rows = [
        layout_of(
            data_folder, "noise", [0, 1, 2, 3], seed=(3, TRAINING, step), vocabulary=10
        )
        for step in range(40)
    ]
    drawn = np.concatenate([row.ids[row.offsets > 0] for row in rows])
    counts = np.bincount(drawn, minlength=10)
    expected = len(drawn) / 10
    assert len(counts) == 10 and len(drawn) > 4_000
    # Chi-squared with 9 degrees of freedom exceeds 27.9 with probability 1/1000.
    assert ((counts - expected) ** 2 / expected).sum() < 27.9


@pytest.mark.parametrize("mask", ["adaptive", "noise", "17"])
def test_only_adaptive_ids_add_rows(
    data_folder: Path, tmp_path: Path, mask: str
) -> None:
    """With noise or an existing token the embedding equals the base model's, bit for bit."""
    from dataclasses import replace

    from tests.conftest import tiny_llama
    from train.config import ModelConfig

    base = tiny_llama(vocab=V)
    base.save_pretrained(tmp_path / "base")
    vocab = replace(vocab_of(data_folder), size=V + 1, adaptive=(V,))
    model = ModelConfig(str(tmp_path / "base"))
    lm = load_trainable(
        model,
        model_config(model),
        vocab=vocab,
        dtype=torch.float32,
        seed=0,
        grows=mask == "adaptive",
    )
    rows = lm.get_input_embeddings().num_embeddings
    assert rows == lm.config.vocab_size == (V + 1 if mask == "adaptive" else V)
    ids = ObjectiveConfig("branch", mask=mask).adaptive_ids(vocab.adaptive)
    assert ids == ((V,) if mask == "adaptive" else ())
    weight = lm.get_input_embeddings().weight[:V]
    assert torch.equal(weight, base.get_input_embeddings().weight)


def test_invalid_masks_are_refused() -> None:
    with pytest.raises(
        ValueError, match="must be adaptive, noise or a token's id, got -1"
    ):
        ObjectiveConfig(mask="-1")
    with pytest.raises(
        ValueError, match="objective.diverse needs objective.mask=adaptive"
    ):
        ObjectiveConfig("dual", mask="noise", diverse=True)
    assert ObjectiveConfig(mask=7).mask_id == 7  # type: ignore[arg-type]
    # A run that began before this setting existed has no mask in its record.
    assert ObjectiveConfig(mask="adaptive").mask is None
    config = TrainConfig(
        objective=ObjectiveConfig("branch", mask="40000"),
        lora=LoraSettings(rank=2, gated=True),
        plan=True,
    )
    with pytest.raises(
        UserError, match="an id below the model's 32,000 rows, got 40000"
    ):
        read_spec(config, None)
