"""train.inspect shows the sequences and windows that a step trains."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from conf.runs.files import CHECKSUM, read_json, with_checksum, write_json
from conf.settings.compose import settings
from data_prep.encode import Encoder
from data_prep.vocab import load_tokenizer
from tests.conftest import vocab_of
from train.inspect import (
    TrainInspectConfig,
    layouts,
    main,
    noise_vocabulary,
    windowed_text,
    windows,
)
from train.objective import Layout, branch, dual
from train.schedule import Schedule
from train.trainer import Trainer

STEP = 3
RECIPES = {
    "dual": ["objective.L=3", "objective.start_rate=0.3"],
    "diverse": ["objective.diverse=true", "objective.start_rate=0.5"],
    "noise": ["objective=branch", "objective.mask=noise"],
    "id": ["objective=basic", "objective.mask=20"],
    "own text": ["objective=branch", "experiment=sdsat_7b_best"],
    "causal": ["objective=causal"],
}


def config_of(folder: Path, *overrides: str) -> TrainInspectConfig:
    shown = [f"inspect.step={STEP}", "inspect.sequences=4", f"data.path={folder}"]
    batch = ["model=tiny", "global_batch=4", "micro_batch=2", "seed=5"]
    return settings("train", TrainInspectConfig, [*overrides, *shown, *batch])


class Captured(Exception):
    """The micro-batches that a step trains."""


def trained(config: TrainInspectConfig, folder: Path) -> list[dict[str, Any]]:
    """Return the micro-batches of a step by the trainer itself."""
    from train.data import TrainingData

    def step(batches: list[dict[str, Any]], *_: object, **__: object) -> None:
        raise Captured(batches)

    vocab = vocab_of(folder)
    trainer = SimpleNamespace(
        config=config,
        data=TrainingData(config),
        engine=SimpleNamespace(device=torch.device("cpu"), step=step),
        step=config.inspect.step,
        rank=0,
        ranks=1,
        vocab=vocab,
        vocabulary=noise_vocabulary(config, vocab),
        schedule=Schedule(config.steps),
    )
    with pytest.raises(Captured) as captured:
        Trainer.train_step(trainer)  # type: ignore[arg-type]
    batches: list[dict[str, Any]] = captured.value.args[0]
    return batches


def sequences_of(batch: Mapping[str, Any]) -> list[Layout]:
    """Return the layout of each sequence of a micro-batch; `dual` has two rows for each."""
    trunk = batch["trunk"]
    arrays = {name: value.numpy() for name, value in batch.items() if name != "trunk"}
    return [
        Layout(**{name: array[row::2] for name, array in arrays.items()}, trunk=trunk)
        for row in range(2)
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_shown_windows_are_those_that_the_trainer_trains(
    recipe: str, data_folder: Path
) -> None:
    """Bug: data_prep.inspect drew windows with a fixed rate, which few recipes have."""
    config = config_of(data_folder, *RECIPES[recipe])
    if recipe == "own text":
        config.data.own = str(data_folder)
    shown = list(layouts(config, vocab_of(data_folder)))
    layout_of = [
        layout
        for batch in trained(config, data_folder)
        for layout in sequences_of(batch)
    ]
    assert len(shown) == len(layout_of) == 4
    for (_, sequence, actual, _), expected in zip(shown, layout_of):
        trunk = expected.trunk
        assert np.array_equal(actual.ids[0, :trunk], expected.ids[0, :trunk])
        pairs = list(zip(windows(actual), windows(expected), strict=True))
        assert bool(pairs) == (recipe != "causal")
        for (start, ids), (trained_start, trained_ids) in pairs:
            assert start == trained_start and np.array_equal(ids, trained_ids)
        assert recipe == "id" or np.array_equal(actual.ids[0, :trunk], sequence.tokens)


TOKENS = np.arange(20, 30)
DOCUMENTS = np.zeros((1, 10), dtype=int)


def drawn(
    layout: Layout, encoder: Encoder, config: TrainInspectConfig, stop: int = 10
) -> str:
    objective = config.objective
    return windowed_text(TOKENS, layout, encoder, objective, 0, stop).plain


def test_how_windows_are_drawn(data_folder: Path) -> None:
    encoder = Encoder(load_tokenizer(data_folder / "tokenizer"), vocab_of(data_folder))
    a, b, c, d, e, f, g, h, i, j = (encoder.decode([id]) for id in TOKENS)
    config = config_of(data_folder, "objective=dual")
    offsets = np.array([[0, 0, 1, 2, 0, 1, 0, 0, 0, 0]])
    layout = dual(TOKENS[None], DOCUMENTS, offsets, (6,))
    expected = f"{a}{b}a1{c}a2{d}{e}a1{f}{g}{h}{i}{j}"
    assert drawn(layout, encoder, config) == expected
    config = config_of(data_folder, "objective=branch", "objective.mask=19")
    free = np.ones((1, 10), dtype=bool)
    starts = [(np.array([2, 3]), np.array([2, 1]))]
    layout = branch(TOKENS[None], DOCUMENTS, starts, free, (19,))
    mask = encoder.decode([19])
    expected = f"{a}{b}⟨{mask}{c}{mask}{d}⟩{c}⟨{mask}{d}⟩{d}{e}"
    assert drawn(layout, encoder, config, stop=5) == expected


def test_sequences_are_printed(
    data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(config_of(data_folder, "objective=branch"))
    printed = capsys.readouterr().out
    assert printed.count(f"step {STEP}, sequence") == 4
    assert "⟨a1" in printed and "<BOS>" in printed and ", PLAIN), tokens " in printed


def test_a_step_after_the_last_is_refused(data_folder: Path) -> None:
    """Bug: it printed sequences that the run never trains."""
    sentence = "inspect.step must be below steps=3, got 3. Lower it"
    with pytest.raises(UserError, match=sentence):
        config_of(data_folder, "objective=dual", "steps=3")
    assert config_of(data_folder, "steps=3", "minutes=1").inspect.step == STEP


def test_own_text_is_named_by_its_own_languages(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: it had the languages of data.path, or ended in an IndexError."""
    own = shutil.copytree(data_folder, tmp_path / "own")
    manifest = read_json(own / "manifest.json")
    manifest.pop(CHECKSUM)
    languages = [f"own {name}" for name in manifest["languages"]]
    write_json(
        own / "manifest.json", with_checksum({**manifest, "languages": languages})
    )
    options = ["objective=branch", f"data.own={own}", "data.own_share=0.5"]
    main(config_of(data_folder, *options))
    printed = capsys.readouterr().out
    assert "(own py, " in printed and "(py, " in printed
