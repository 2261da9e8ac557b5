"""A page to try a model on: its own decoding beside plain decoding of the same prompt, both streaming."""

from dataclasses import dataclass, field

from conf.schema import MODEL
from infer.config import DraftConfig, check_at_least, check_dtype


@dataclass
class PlaygroundConfig:
    """python -m infer.playground: a page to try a model on, on this machine."""

    model: str = field(metadata=MODEL)  # a Transformers directory, best an export, or a hub name
    draft: DraftConfig = field(default_factory=DraftConfig)
    dtype: str = "float32"  # of the weights: float32, bfloat16 or float16
    device: str | None = None  # cpu or cuda:N; null: a GPU where there is one
    threads: int | None = None  # of the CPU; null: the library's choice
    host: str = "127.0.0.1"  # the address to listen on; 0.0.0.0: all networks, without a password
    port: int = 7860  # the port to listen on

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_at_least(self, {"threads": 1})
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port must be 1 to 65535, got {self.port}. The default is 7860.")
