"""A checkpoint's files as byte ranges, and weights as Transformers writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from conf import UserError
from tests.full_disk import largest_file
from train.checkpoint import cut, index, locate, read
from train.export.weights import CheckpointWeights, write_weights

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, **HEADS),
    "tied": LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=True),
    "mixtral": MixtralConfig(
        **SMALL, **HEADS, num_local_experts=4
    ),  # has names of its publisher's
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three vectors, views of one storage, of a matrix in bfloat16 and of single numbers."""
    path = tmp_path_factory.mktemp("saved") / "x.pt"
    both = torch.arange(7, dtype=torch.float32)
    torch.save(
        {
            "a": both[:3],
            "b": both[3:],
            "c": torch.rand(5, 4).bfloat16(),
            "d": [torch.tensor(2.0)],
        },
        path,
    )
    return path


@pytest.mark.parametrize("block", [3, 2**22])
def test_an_index_knows_where_every_number_lies(
    saved: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("train.checkpoint.BLOCK", block)
    tensors = torch.load(saved)
    indexed = index(saved)
    for name in ("a", "b", "c"):
        part = locate(saved, indexed[name])
        shape = tensors[name].shape
        assert torch.equal(read([part], shape, tensors[name].dtype), tensors[name])
        assert torch.equal(read([part], shape, torch.float64), tensors[name].double())


@given(start=st.integers(0, 27), count=st.integers(0, 27))
def test_a_cut_is_a_slice_of_the_pieces_end_to_end(
    saved: Path, start: int, count: int
) -> None:
    tensors, indexed = torch.load(saved), index(saved)
    names = ("b", "c", "a")
    whole = torch.cat([tensors[name].flatten().float() for name in names])
    pieces = [locate(saved, indexed[name]) for name in names]
    if start + count <= len(whole):
        assert torch.equal(
            read(cut(pieces, start, count), (count,), torch.float32),
            whole[start : start + count],
        )
    else:
        with pytest.raises(
            ValueError, match=f"must be {count} numbers from {start} on, got 27 in all"
        ):
            cut(pieces, start, count)


@pytest.mark.parametrize("size", ["4KB", "1GB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_are_those_of_save_pretrained(
    name: str, size: str, tmp_path: Path
) -> None:
    """Byte for byte. Only the division of a mixture of experts differs: it precedes splitting the experts."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    lm = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16)
    lm.save_pretrained(theirs, max_shard_size=size)
    lm.config.save_pretrained(ours)
    write_weights(
        CONFIGS[name], lm.state_dict(), ours, dtype=torch.bfloat16, shard_size=size
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        ours, dtype=torch.bfloat16
    ).state_dict()
    assert all(
        torch.equal(loaded[key], tensor) for key, tensor in lm.state_dict().items()
    )
    for index_file in theirs.glob("*.index.json"):
        first, second = (
            json.loads((folder / index_file.name).read_text())
            for folder in (ours, theirs)
        )
        assert first["metadata"] == second["metadata"]
        assert first["weight_map"].keys() == second["weight_map"].keys()
    if (name, size) != ("mixtral", "4KB"):
        files = sorted(path.name for path in theirs.glob("*.safetensors"))
        assert files == sorted(path.name for path in ours.glob("*.safetensors"))
        assert all(
            (ours / file).read_bytes() == (theirs / file).read_bytes() for file in files
        )


def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path: Path) -> None:
    """safetensors raises its own error; here the size of files is limited."""
    config = CONFIGS["llama"]
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    with largest_file(10_000), pytest.raises(OSError) as error:
        write_weights(config, weights, tmp_path, dtype=torch.float32, shard_size="1GB")
    assert error.value.filename == str(tmp_path / "model.safetensors")
    assert error.value.errno == 27


class Stranger:
    """No part of a checkpoint."""


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1],
        {"optimizer": None},
        {"module": {"a": torch.zeros(1).expand(9, 9)}, "optimizer": None},
        {"weight": torch.zeros(2), "more": Stranger()},
    ],
    ids=["no file", "a list", "no weights", "a tensor with gaps", "a foreign class"],
)
def test_files_that_no_training_wrote_are_one_sentence(
    tmp_path: Path, value: Any
) -> None:
    if value is not None:
        torch.save(value, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="must (hold|be) (files|a file) as"):
        CheckpointWeights(tmp_path)
