"""The settings of `python -m data_prep`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataConfig:
    """Where documents come from."""

    path: str
    kind: str = "folder"  # folder: source files below `path`; starcoder: parquet with a `content` column
    include: list[str] = field(default_factory=lambda: ["**/*"])  # globs, for kind=folder
    max_bytes: int = 1_000_000  # larger files are dropped, and counted
    split_chars: int | None = None  # cut documents into pieces of whole lines up to this long

    def __post_init__(self) -> None:
        if self.kind not in ("folder", "starcoder"):
            raise ValueError(f"data.kind: wanted folder or starcoder, found {self.kind}")


@dataclass
class VocabConfig:
    """The control pieces of the tokenizer, by name, and its adaptive tokens, by name or id."""

    bos: str = "<s>"
    eos: str = "</s>"
    pre: str = "▁<PRE>"
    suf: str = "▁<SUF>"
    mid: str = "▁<MID>"
    eot: str = "▁<EOT>"
    adaptive: list[Any] = field(default_factory=list)
    train_size: int | None = None  # train a byte-level BPE of this size when no tokenizer is given


@dataclass
class DataPrepConfig:
    """python -m data_prep: source files -> packed token shards with a manifest."""

    out: str
    data: DataConfig
    vocab: VocabConfig
    tokenizer: str | None = None  # a folder with tokenizer.json
    seq_len: int = 16384
    fim_rate: float = 0.5  # share of documents laid out for infilling
    spm_rate: float = 0.5  # share of those in suffix-prefix-middle order
    held_out: float = 0.01  # share of files kept out of training
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("fim_rate", "spm_rate", "held_out"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: wanted a share between 0 and 1, found {getattr(self, name)}")
        if self.seq_len < 16:
            raise ValueError(f"seq_len: wanted at least 16 tokens, found {self.seq_len}")
        if (self.tokenizer is None) == (self.vocab.train_size is None):
            raise ValueError("wanted either tokenizer=DIR or vocab.train_size=N, found both or neither")
