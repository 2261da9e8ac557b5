import json
import shutil
from pathlib import Path

import pytest

from conf import UserError
from data_prep.vocab import Vocab
from tests.train.export.export_fixture import training
from train.config import ModelConfig
from train.export.sidecars import write_tokenizer
from train.model.pretrained import check_tokenizer


def test_what_was_exported_can_be_trained_on(tmp_path: Path) -> None:
    """The export marks control ids special, which changed no id of any text, and was taken for another
    tokenizer.
    """
    folder, manifest = training(tmp_path / "tuned")
    vocab, exported = Vocab.from_json(manifest["vocab"]), tmp_path / "model"
    shutil.copytree(folder / "model", tmp_path / "data" / "tokenizer")
    shutil.copytree(folder / "model", exported)
    file = exported / "tokenizer.json"
    value = json.loads(file.read_text())
    value["added_tokens"] = [one for one in value["added_tokens"] if one["id"] not in vocab.adaptive]
    file.write_text(json.dumps(value))
    write_tokenizer(exported, vocab, vocab.adaptive)
    check_tokenizer(ModelConfig(path=str(exported)), str(tmp_path / "data"))
    value["model"]["vocab"]["more"] = len(value["model"]["vocab"])
    file.write_text(json.dumps(value))
    with pytest.raises(UserError, match="found shards of another tokenizer"):
        check_tokenizer(ModelConfig(path=str(exported)), str(tmp_path / "data"))
