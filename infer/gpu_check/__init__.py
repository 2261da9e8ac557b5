"""What this project claims of a GPU, checked and measured on the one at hand, without downloads.

Shapes are LlamaConfig's settings; weights are random, so nothing is downloaded.

PyTorch is imported late: names of shapes are checked before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conf.schema import PATH
from infer.config import check_dtype


@dataclass
class GpuCheckConfig:
    """python -m infer.gpu_check: parity and speed of decoding on this GPU, with random weights."""

    out: str = field(metadata=PATH)  # the JSON file to write
    device: str = "cuda"  # cuda, or cpu to try the check itself with shapes=[tiny]
    # models that are timed: codellama_7b, codellama_13b, tiny
    shapes: list[str] = field(default_factory=lambda: ["codellama_7b", "codellama_13b"])
    dtype: str = "bfloat16"  # of what is timed: float32, bfloat16 or float16
    k: list[int] = field(default_factory=lambda: [3, 5, 7, 13])  # drafts in a row that are timed
    context: int = 1024  # tokens in the cache of what is timed
    rounds: int = 25  # repetitions of every measurement
    compile: bool = True  # the forward by torch.compile, before it is captured
    prompts: int = 8  # in every comparison with plain decoding

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device must be cuda or cpu, got {self.device}")
        for name in self.shapes:
            if name not in SHAPES:
                raise ValueError(f"shapes must be some of {', '.join(SHAPES)}, got {name}")
        check_dtype(self.dtype)
        if not self.k or min(self.k) < 1:
            raise ValueError(f"k must be numbers of adaptive tokens from 1 on, got {self.k}")
        if self.rounds < 3 or self.prompts < 2 or self.context < 16:
            raise ValueError("rounds, prompts and context must be at least 3, 2 and 16")


if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

ModelShape = Mapping[str, Any]

SHAPES: dict[str, ModelShape] = {
    "codellama_7b": {
        "vocab_size": 32016,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 16384,
    },
    "codellama_13b": {
        "vocab_size": 32016,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "max_position_embeddings": 16384,
    },
    "tiny": {
        "vocab_size": 199,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}
# Of weights this far apart the next token depends on all before it, and seldom nearly ties.
LIVELY: ModelShape = {
    "vocab_size": 499,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}


def random_model(shape: ModelShape, *, dtype: "torch.dtype", device: str) -> "LlamaForCausalLM":
    """Return the same weights each time on one kind of device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        lm = LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=dtype)
    return lm.eval()
