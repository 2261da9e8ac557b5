"""Test slices of checkpoint vectors, and weights against Transformers' save_pretrained."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from conf.runs.files import read_json
from tests.full_disk import largest_file
from train.export.weights import join, slice_vector, write_weights

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
    # Its checkpoints have other weight names than Transformers' model.
    "mixtral": MixtralConfig(**SMALL, **HEADS, num_local_experts=4),
}


@given(
    sizes=st.lists(st.integers(0, 5), max_size=4),
    start=st.integers(0, 20),
    count=st.integers(0, 20),
)
def test_slice_vector_slices_the_concatenated_vectors(
    sizes: list[int], start: int, count: int
) -> None:
    whole = torch.arange(sum(sizes))
    vectors = list(whole.split(sizes)) if sizes else []
    if start + count <= len(whole):
        parts = join(slice_vector(vectors, start, count), (count,), torch.int64)
        assert torch.equal(parts, whole[start : start + count])
    else:
        with pytest.raises(ValueError, match=f"got {len(whole)}$"):
            slice_vector(vectors, start, count)


@pytest.mark.parametrize("size", ["4KB", "1GB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_equal_save_pretrained(name: str, size: str, tmp_path: Path) -> None:
    """Files are equal byte for byte, except shards of experts.

    save_pretrained divides weights into files before it splits the experts.
    """
    library, out = tmp_path / "library", tmp_path / "out"
    lm = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16)
    weights = lm.state_dict()
    lm.save_pretrained(library, max_shard_size=size)
    lm.config.save_pretrained(out)
    write_weights(CONFIGS[name], weights, out, dtype=torch.bfloat16, shard_size=size)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(weights[key], tensor)
    for file in library.glob("*.index.json"):
        first, second = (read_json(folder / file.name) for folder in (out, library))
        assert first["metadata"] == second["metadata"]
        assert first["weight_map"].keys() == second["weight_map"].keys()
    if (name, size) != ("mixtral", "4KB"):
        files = [
            {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
            for folder in (library, out)
        ]
        assert files[0] == files[1]


def test_a_full_disk_raises_an_os_error_with_the_files_name(tmp_path: Path) -> None:
    """safetensors raises its own error. The test limits the size of files."""
    config = CONFIGS["llama"]
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    with largest_file(10_000), pytest.raises(OSError) as error:
        write_weights(config, weights, tmp_path, dtype=torch.float32, shard_size="1GB")
    assert error.value.filename == str(tmp_path / "model.safetensors")
