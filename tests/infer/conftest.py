"""Fixtures: a model directory with random weights, the demo's tokenizer and adaptive.json."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conf.runs.files import write_json
from data_prep.vocab import INFILLING
from infer import Model, load
from infer.models.checkpoint import ModelDirectory
from tests.conftest import tiny_llama, vocab_of
from tests.infer.library import Generate, drafting

ROWS = 400  # of data_folder's tokenizer


@pytest.fixture(scope="session")
def model_dir(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with identical adaptive tokens, L=3 and infilling."""
    folder = tmp_path_factory.mktemp("models") / "model"
    lm = tiny_llama(vocab=ROWS)
    with torch.no_grad():
        # A few tokens make up most of the text, so that drafts come true now and then.
        lm.lm_head.weight[torch.arange(ROWS) % 50 > 0] *= 0.2
    lm.save_pretrained(folder)
    shutil.copyfile(
        data_folder / "tokenizer" / "tokenizer.json", folder / "tokenizer.json"
    )
    vocab = vocab_of(data_folder)
    described = {
        "adaptive_ids": vocab.adaptive[:1],
        "L": 3,
        "bos": vocab.bos,
        "infilling": {name: getattr(vocab, name) for name in INFILLING},
    }
    write_json(folder / "adaptive.json", described)
    return folder


@pytest.fixture(scope="session")
def base_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model directory without adaptive.json."""
    folder = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("adaptive.json"))
    return folder


@pytest.fixture(scope="session")
def model(model_dir: Path) -> Model:
    """The model directory, loaded in float32."""
    return load(model_dir, "float32")


@pytest.fixture(scope="module")
def lm(model_dir: Path) -> PreTrainedModel:
    """The model, loaded by Transformers alone."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours(lm: PreTrainedModel, model_dir: Path) -> Generate:
    return drafting(lm, *ModelDirectory(model_dir).need_adaptive().ids)


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `use_whole_models`, which infer.bench calls, before the next test."""
    monkeypatch.setattr("infer.models.parallel._whole_models", False)
