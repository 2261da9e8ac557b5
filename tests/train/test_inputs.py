"""A finished training is that of the very weights it began with."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from conf import UserError, settings
from conf.stage import write_manifest
from data_prep.ngrams import TABLE
from tests.conftest import tiny_llama
from train import __main__ as entry
from train.config import TrainConfig
from train.model.pretrained import _read_model


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
    with pytest.raises(UserError, match=r"requested inputs\.model\.path"):
        entry.main(config)


def test_a_base_model_with_an_adapter_is_refused(tmp_path: Path) -> None:
    """The library adds an adapter that lies beside config.json: a training of such a model could not be
    exported.
    """
    lm, base = tiny_llama(vocab=400), tmp_path / "base"
    lm.save_pretrained(base)
    get_peft_model(lm, LoraConfig(target_modules=["q_proj"])).save_pretrained(base)
    read, sentence = _read_model(str(base), dtype=torch.float32, attention="eager")
    assert "must be a model without an adapter, got adapter_config.json" in sentence
    (base / "adapter_config.json").unlink()
    assert _read_model(str(base), dtype=torch.float32, attention="eager")[1] == ""


def test_a_damaged_n_gram_table_is_refused(data_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    (data / TABLE).write_bytes((data / TABLE).read_bytes()[:-2])
    given = ["experiment=demo_base", f"data.path={data}", f"out={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=rf"{TABLE} must be a whole n-gram table, got a checksum mismatch"):
        entry.main(settings("train", TrainConfig, given))
