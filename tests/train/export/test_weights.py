"""A checkpoint's tensors, mapped and cut, and weights as Transformers writes them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from conf import UserError
from tests.full_disk import largest_file
from train.checkpoint import cut, index, read
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


def test_an_index_has_every_number(saved: Path) -> None:
    tensors, indexed = torch.load(saved), index(saved)
    for name in ("a", "b", "c"):
        part, shape = indexed[name].flatten(), tensors[name].shape
        assert torch.equal(read([part], shape, tensors[name].dtype), tensors[name])
        assert torch.equal(read([part], shape, torch.float64), tensors[name].double())


@given(start=st.integers(0, 27), count=st.integers(0, 27))
def test_a_cut_is_a_slice_of_the_pieces_end_to_end(
    saved: Path, start: int, count: int
) -> None:
    tensors, indexed = torch.load(saved), index(saved)
    names = ("b", "c", "a")
    whole = torch.cat([tensors[name].flatten().float() for name in names])
    pieces = [indexed[name].flatten() for name in names]
    if start + count <= len(whole):
        assert torch.equal(
            read(cut(pieces, start, count), (count,), torch.float32),
            whole[start : start + count],
        )
    else:
        with pytest.raises(
            ValueError, match=f"{count} numbers from {start} on in vectors of 27"
        ):
            cut(pieces, start, count)


class Stranger:
    """What no checkpoint of ours holds."""


def test_a_file_that_holds_more_than_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"weight": torch.zeros(2), "more": Stranger()}, path)
    with pytest.raises(
        UserError,
        match=r"x\.pt must be a file as DeepSpeed .*, got a pickle of .*Stranger",
    ):
        index(path)
    path.write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"x\.pt must be a file as DeepSpeed"):
        index(path)


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


def test_weights_can_be_read_by_whoever_can_enter_the_folder(tmp_path: Path) -> None:
    """safetensors writes files that their owner alone can read: a colleague could not serve the model."""
    config = CONFIGS["llama"]
    lm = AutoModelForCausalLM.from_config(config)
    tmp_path.chmod(0o755)
    write_weights(
        config, lm.state_dict(), tmp_path, dtype=torch.float32, shard_size="1GB"
    )
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_why_weights_cannot_be_written(tmp_path: Path) -> None:
    """safetensors raises its own error for a full disk; here the size of files is limited."""
    config = CONFIGS["llama"]
    lm = AutoModelForCausalLM.from_config(config)
    with largest_file(10_000), pytest.raises(OSError) as error:
        write_weights(
            config, lm.state_dict(), tmp_path, dtype=torch.float32, shard_size="1GB"
        )
    assert error.value.errno == 27 and error.value.strerror == os.strerror(27)
    assert error.value.filename == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1],
        {"optimizer": None},
        {"module": [1], "optimizer": None},
        {
            "module": {"a": torch.zeros(1).expand(9, 9)},
            "optimizer": None,
            "shared_params": {},
        },
    ],
    ids=["no file", "a list", "no weights", "a list of weights", "a tensor with gaps"],
)
def test_files_that_no_training_wrote_are_one_sentence(
    tmp_path: Path, value: Any
) -> None:
    """A foreign checkpoint was a traceback: StopIteration, KeyError, AssertionError."""
    if value is not None:
        torch.save(value, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="must hold files as train writes them, got"):
        CheckpointWeights(tmp_path)
