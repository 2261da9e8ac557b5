"""The settings of `python -m infer.gpu_check`."""

from dataclasses import dataclass, field

from conf.typed import PATH
from infer.config import check_dtype
from infer.gpu_check.shapes import SHAPES


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
