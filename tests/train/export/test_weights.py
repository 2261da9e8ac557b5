"""Weights of a checkpoint, and as Transformers writes them."""

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
from train.checkpoint import cut, read
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


@given(
    sizes=st.lists(st.integers(0, 5), max_size=4),
    start=st.integers(0, 20),
    count=st.integers(0, 20),
)
def test_a_cut_is_a_slice_of_the_vectors_end_to_end(
    sizes: list[int], start: int, count: int
) -> None:
    whole = torch.arange(sum(sizes))
    vectors = list(whole.split(sizes)) if sizes else []
    if start + count <= len(whole):
        parts = read(cut(vectors, start, count), (count,), torch.int64)
        assert torch.equal(parts, whole[start : start + count])
    else:
        with pytest.raises(ValueError, match=f"in vectors of {len(whole)}"):
            cut(vectors, start, count)


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


class Stranger:
    """No part of a checkpoint."""


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1],
        {"optimizer": None},
        {"weight": torch.zeros(2), "more": Stranger()},
    ],
    ids=["no file", "a list", "no weights", "a foreign class"],
)
def test_files_that_no_training_wrote_are_one_sentence(
    tmp_path: Path, value: Any
) -> None:
    if value is not None:
        torch.save(value, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="must (hold|be) (files|a file) as"):
        CheckpointWeights(tmp_path)
