"""Choose documents: remove near-duplicates, and meet a budget of tokens.

datatrove's MinHash finds near-duplicates with 14 buckets of 8 hashes of word 5-grams, which
finds pairs of similarity 0.8 with probability 0.92. There are three phases: signatures of
each part, pairs in each bucket, clusters of all documents. One document of a cluster stays.

The budget is divided over the languages (SDSAT §3.1). Each document has a bin, a hash of the
seed and its id. The size of every bin is counted once. A language's threshold is the number
of bins that fill its share, and documents in lower bins are chosen. So the choice depends only
on a document's id, and shares are exact up to one bin. There are two phases: measure each part,
choose the thresholds.
"""

import csv
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import as_user_error
from conf.runs.files import allow_many_files
from data_prep.config import DataPrepConfig
from data_prep.document import (
    Document,
    Drop,
    documents_of,
    hash64,
    split,
    uniform_hash,
)
from data_prep.encode import encode
from data_prep.job import Job

BUCKETS = 14  # datatrove's default
# Only this many characters of a document are hashed, since datatrove keeps 112 hashes of every
# word in memory.
SIGNED_CHARS = 100_000
WORD = re.compile(r"\w+")


def sign(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Write the MinHash signatures of a part's documents; return the file and row of each."""
    from datatrove.data import Document as Text
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import HashConfig, MinhashConfig
    from datatrove.utils.text import TextNormConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

    class CodeWords(WordTokenizer):
        """Tokenize source code; datatrove's tokenizers are for natural languages."""

        def word_tokenize(self, text: str) -> list[str]:
            return WORD.findall(text)

        def sent_tokenize(self, text: str) -> list[str]:
            return text.splitlines()

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [match.span() for match in WORD.finditer(text)]

    _prepare_library()
    rows: list[tuple[str, int]] = []

    def texts() -> Any:
        for document in documents_of(job.screen(job.rows(part))):
            rows.append((document.file, document.row))
            yield Text(text=document.text[:SIGNED_CHARS], id=document.id)

    config = MinhashConfig(
        hash_config=HashConfig(hash_fc="sha1"),  # the default fails with xxhash 4
        # By default all numbers are equal, and so are questions that differ in them.
        norm_config=TextNormConfig(norm_numbers=False),
    )
    step = MinhashDedupSignature(str(folder), config, language=CodeWords())
    step.run(texts(), rank=part, world_size=len(job.parts))
    _move(folder, job.work / "signatures")
    return {"rows": rows}


def match(job: Job, bucket: int, folder: Path) -> dict[str, Any]:
    """Write the pairs of documents with equal signatures in one bucket."""
    from datatrove.pipeline.dedup import MinhashDedupBuckets

    _prepare_library()
    step = MinhashDedupBuckets(str(job.work / "signatures"), str(folder))
    step.run(rank=bucket, world_size=BUCKETS)
    _move(folder, job.work / "pairs")
    return {}


def cluster(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Write the documents to remove for each part: all except one of each cluster."""
    from datatrove.pipeline.dedup import MinhashDedupCluster

    _prepare_library()
    MinhashDedupCluster(str(job.work / "pairs"), str(folder)).run()
    return {}


def _move(folder: Path, target: Path) -> None:
    """Move a task's files to the folder of all tasks, each file atomically."""
    for path in folder.rglob("*"):
        if path.is_file():
            destination = target / path.relative_to(folder)
            destination.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, destination)


def drop_near_duplicates(
    job: Job, part: int, rows: Iterable[Document | Drop]
) -> Iterator[Document | Drop]:
    """Yield the rows of a part, with a Drop instead of each near-duplicate."""
    # Absent if near_duplicates is off, or if the part has no duplicates.
    path = job.done("cluster") / f"{part:06d}.remove"
    if not path.is_file():
        yield from rows
        return
    signed = job.read_facts("sign", part)["rows"]
    indices = np.fromfile(path, dtype="<u4").tolist()
    removed = {tuple(signed[index]) for index in indices}
    for row in rows:
        if isinstance(row, Document) and (row.file, row.row) in removed:
            yield row.drop("near-duplicate")
        else:
            yield row


def _prepare_library() -> None:
    from loguru import logger

    logger.disable("datatrove")
    allow_many_files()  # datatrove opens one file per part at once


BINS = 2**14
SAMPLE_BYTES = 16_000_000  # size of the sample that gives the tokens per byte
LONGEST_FIELD = 2**31 - 1  # characters of a field of a proportion table
BINS_FILE = "bins.npz"
UNLISTED = 3  # languages to name that a proportion table does not list
# Accepted names of the size column of a proportion table, by proportion.by.
SIZE_COLUMNS = {"bytes": ("bytes", "characters"), "files": ("files", "documents")}


def bin_of(seed: int, id: str) -> int:
    """Return the bin of a document, 0 <= bin < BINS: a uniform hash of its id and the seed."""
    return hash64(seed, "choose", id) >> 50


@dataclass
class Measure:
    """The size of a language: (BINS,) files and bytes by bin; tokens and bytes of a sample."""

    files: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    bytes: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    sample_tokens: int = 0
    sample_bytes: int = 0

    def add(self, other: "Measure") -> None:
        """Add the size in another part, in place."""
        self.files += other.files
        self.bytes += other.bytes
        self.sample_tokens += other.sample_tokens
        self.sample_bytes += other.sample_bytes


@dataclass(frozen=True)
class LanguageBudget:
    """The number of tokens to choose from one language."""

    threshold: int  # bins below the threshold are chosen
    share: float  # of the budget, by the settings
    exhausted: bool  # True if the language has less data than its share


def choose(
    measures: Mapping[str, Measure],
    shares: Mapping[str, float],
    *,
    tokens: float,
    by: str,
) -> dict[str, LanguageBudget]:
    """Return thresholds that choose about `tokens` tokens, in proportion to `shares`.

    `by` is the unit of the shares, "bytes" or "files". Shares of languages without data are
    spread over the other languages. If a language has less data than its share, all of it is
    chosen, and the other languages fill the budget. A language with share 0 is left out.
    """
    known = {name: share for name, share in shares.items() if name in measures}
    total = sum(known.values()) or 1.0
    known = {name: share / total for name, share in known.items()}
    filled = {name: _cumulated(getattr(measures[name], by)) for name in known}
    costs = {
        name: _cumulated(measures[name].bytes * _tokens_per_byte(measures, name))
        for name in known
    }

    def thresholds(scale: float) -> dict[str, int]:
        return {name: _nearest(filled[name], scale * known[name]) for name in known}

    def cost(scale: float) -> float:
        return float(sum(costs[name][bins] for name, bins in thresholds(scale).items()))

    low = 0.0
    whole = (filled[name][-1] / share for name, share in known.items() if share)
    high = max(whole, default=0.0)
    too_small = cost(high) < 0.99 * tokens  # all data together
    if cost(high) > tokens:
        for _ in range(64):
            middle = (low + high) / 2
            if cost(middle) <= tokens:
                low = middle
            else:
                high = middle
        if tokens - cost(low) <= cost(high) - tokens:
            high = low
    result: dict[str, LanguageBudget] = {}
    for name, threshold in thresholds(high).items():
        share = known[name]
        lacking = too_small or filled[name][-1] < 0.99 * high * share
        exhausted = bool(share and lacking)
        result[name] = LanguageBudget(threshold, share, exhausted)
    return result


def _tokens_per_byte(measures: Mapping[str, Measure], name: str) -> float:
    """Return a language's tokens per byte; the mean of all languages if it has no sample."""
    own = measures[name]
    sampled = [own] if own.sample_bytes else list(measures.values())
    sample_bytes = sum(measure.sample_bytes for measure in sampled)
    sample_tokens = sum(measure.sample_tokens for measure in sampled)
    return sample_tokens / sample_bytes if sample_bytes else 0.25


def _cumulated(sizes: np.ndarray) -> np.ndarray:
    return np.cumsum(np.append(0, sizes))


def _nearest(cumulated: np.ndarray, target: float) -> int:
    """Return the index of the value nearest to the target."""
    above = min(int(np.searchsorted(cumulated, target)), len(cumulated) - 1)
    below = max(above - 1, 0)
    return above if cumulated[above] - target <= target - cumulated[below] else below


def own_shares(measures: Mapping[str, Measure], by: str) -> dict[str, float]:
    """Return each language's share of the data, in files or bytes."""
    sizes = {name: float(getattr(own, by).sum()) for name, own in measures.items()}
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items() if size}


def read_table(config: DataPrepConfig) -> dict[str, float]:
    """Return each language's size from the CSV file proportion.table.

    The first column is the language. Raises UserError for a malformed table.
    """
    columns = SIZE_COLUMNS[config.proportion.by]
    csv.field_size_limit(LONGEST_FIELD)  # Python's default is 131,072 characters
    table_errors = as_user_error(
        f"proportion.table={config.proportion.table} must be a CSV file with a first "
        f"column of languages and a column {columns[0]} or {columns[1]} with sizes of at "
        "least 0 and one above 0, got",
        ". Correct the table",
    )
    with table_errors, open(str(config.proportion.table), encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        names = list(rows.fieldnames or [])
        column = next((name for name in columns if name in names[1:]), None)
        if column is None:
            raise ValueError(f"the columns {', '.join(names) or 'of an empty file'}")
        sizes: dict[str, float] = {}
        for row in rows:
            language = row[names[0]]
            where = f"for {language} in line {rows.line_num}"
            if None in row:
                raise ValueError(f"more fields than the header {where}")
            if language in sizes:
                raise ValueError(f"a second size {where}")
            sizes[language] = _size(row[column], where)
        if not any(sizes.values()):
            raise ValueError("no size above 0")
    return sizes


def _size(text: str | None, where: str) -> float:
    """Return the size in a cell of a proportion table; `text` is None if the row has no such cell."""
    try:
        size = float(text or "")
    except ValueError:
        size = math.nan
    if not 0 <= size < math.inf:
        raise ValueError(f"{text or 'no size'} {where}")
    return size


def measure(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Measure the documents of a part that pass the filters, by language and bin."""
    config = job.config
    measures: defaultdict[str, Measure] = defaultdict(Measure)
    sample: list[Document] = []
    rate = min(1.0, SAMPLE_BYTES / max(1, sum(part.size for part in job.parts)))
    rows = drop_near_duplicates(job, part, job.rows(part))
    for document in documents_of(job.screen(rows)):
        counted = measures[document.language]
        size = len(document.text.encode())
        index = bin_of(config.seed, document.id)
        counted.files[index] += 1
        counted.bytes[index] += size
        if uniform_hash(config.seed, "sample", document.id) < rate:
            sample += split(document, config.data.split_chars)
            counted.sample_bytes += size
    # In one call, since each call with new words copies the encoder's word cache.
    for document, _, ids in encode(sample, config, job.encoder):
        measures[document.language].sample_tokens += len(ids)
    np.savez_compressed(
        folder / BINS_FILE,
        files=[own.files for own in measures.values()],
        bytes=[own.bytes for own in measures.values()],
    )
    return {
        "languages": {
            name: [own.sample_tokens, own.sample_bytes]
            for name, own in measures.items()
        }
    }


def choose_documents(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Add up the sizes of all parts, and choose each language's threshold.

    `unlisted` are languages that proportion.table does not list, the largest first.
    """
    tokens = job.config.budget_tokens
    assert tokens is not None
    measures: defaultdict[str, Measure] = defaultdict(Measure)
    for part in range(len(job.parts)):
        bins = np.load(job.done("measure", part) / BINS_FILE)
        languages = job.read_facts("measure", part)["languages"]
        # Indexing an npz file reads it, so do it once, not per language.
        rows = zip(languages.items(), bins["files"], bins["bytes"])
        for (name, sampled), files, sizes in rows:
            measures[name].add(Measure(files, sizes, *sampled))
    by = job.config.proportion.by
    shares = job.plan["shares"] or own_shares(measures, by)
    budgets = choose(measures, shares, tokens=tokens, by=by)
    unlisted = measures.keys() - shares.keys()
    return {
        "chosen": {name: asdict(part) for name, part in sorted(budgets.items())},
        "without_data": sorted(
            name for name, share in shares.items() if share and name not in budgets
        ),
        "unlisted": sorted(
            unlisted, key=lambda name: (-int(measures[name].bytes.sum()), name)
        )[:UNLISTED],
    }


def apply_budget(
    job: Job, rows: Iterable[Document | Drop], counts: Counter[str]
) -> Iterator[Document | Drop]:
    """Yield the documents that the budget chooses, and all drops; count the rest as "not chosen"."""
    if job.config.budget is None:
        yield from rows
        return
    languages = job.read_facts("choose")["chosen"]
    thresholds = {name: part["threshold"] for name, part in languages.items()}
    shares = job.plan["shares"]
    for row in rows:
        if isinstance(row, Drop):
            yield row
        elif shares is not None and row.language not in shares:
            yield row.drop("unknown language", row.language)
        # Documents of a language without a threshold are dropped by the filters later.
        elif bin_of(job.config.seed, row.id) < thresholds.get(row.language, BINS):
            yield row
        else:
            counts["not chosen"] += 1
