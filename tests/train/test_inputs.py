"""A finished training is that of the very weights it began with."""

from pathlib import Path

import pytest
import torch

from conf import UserError, settings
from conf.stage import write_manifest
from tests.conftest import tiny_llama
from train import __main__ as entry
from train.config import TrainConfig


def test_a_training_of_other_base_weights_is_not_finished(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model without a manifest was known by its path alone: another one in its place was "finished"."""

    def train(config: TrainConfig, made: dict, data: dict) -> None:
        write_manifest(config.out, "checkpoint", made)
        raise KeyboardInterrupt

    monkeypatch.setattr("train.checks.check_start", lambda *args: None)
    monkeypatch.setattr("train.loop.train", train)
    lm = tiny_llama(vocab=400)
    lm.save_pretrained(tmp_path / "base")
    given = [f"data.path={data_folder}", f"model.path={tmp_path / 'base'}", f"out={tmp_path / 'out'}"]
    config = settings("train", TrainConfig, ["experiment=demo", *given])
    with pytest.raises(KeyboardInterrupt):
        entry.main(config)
    with torch.no_grad():
        lm.lm_head.weight[7] = 0
    lm.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"now asked for with inputs\.model\.path"):
        entry.main(config)
