"""Choose documents: one of each cluster of near-duplicates, of these a budget's share.

Near-duplicates are found by datatrove's MinHash: 14 buckets of 8 hashes of 5-grams of
words, which finds pairs of similarity 0.8 with probability 0.92. Three phases: signatures
of a part, pairs in a bucket, clusters of all.

A budget of tokens is met in proportion to the languages (SDSAT §3.1). Every document has
a bin, a hash of the seed and its id. The bins' sizes are counted once; a language's
threshold is the bin up to which its documents fill its share. So a document is chosen by
its id alone, with no shuffle and no state, and the shares are met as closely as one bin
allows. Two phases: every part is measured, the thresholds are chosen.
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

from conf.errors import Refusing
from conf.files import allow_many_files
from data_prep.config import DataPrepConfig
from data_prep.document import Document, Drop, documents_of, hash64, split, unit
from data_prep.encode import encode
from data_prep.job import Job

BUCKETS = 14  # datatrove's default
# Of a document, since the library holds 112 hashes of every word at once.
SIGNED_CHARS = 100_000
WORD = re.compile(r"\w+")


def sign(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Write MinHash signatures of a part's documents; return which rows they are."""
    from datatrove.data import Document as Text
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import HashConfig, MinhashConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

    class CodeWords(WordTokenizer):
        """Words of source code, where the library's own are those of natural languages."""

        def word_tokenize(self, text: str) -> list[str]:
            return WORD.findall(text)

        def sent_tokenize(self, text: str) -> list[str]:
            return text.splitlines()

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [match.span() for match in WORD.finditer(text)]

    _prepare_library()
    rows: list[tuple[str, int]] = []

    def texts() -> Any:
        for document in documents_of(job.screened(job.rows(part))):
            rows.append((document.file, document.row))
            yield Text(text=document.text[:SIGNED_CHARS], id=document.id)

    # The library's default hash fails on text with xxhash 4.
    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    step = MinhashDedupSignature(str(folder), config, language=CodeWords())
    step.run(texts(), rank=part, world_size=len(job.parts))
    _move(folder, job.work / "signatures")
    return {"rows": rows}


def match(job: Job, bucket: int, folder: Path) -> dict[str, Any]:
    """Write pairs of documents with the same signature in one bucket."""
    from datatrove.pipeline.dedup import MinhashDedupBuckets

    _prepare_library()
    step = MinhashDedupBuckets(str(job.work / "signatures"), str(folder))
    step.run(rank=bucket, world_size=BUCKETS)
    _move(folder, job.work / "pairs")
    return {}


def cluster(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Write all but one of each cluster of documents, by part."""
    from datatrove.pipeline.dedup import MinhashDedupCluster

    _prepare_library()
    MinhashDedupCluster(str(job.work / "pairs"), str(folder)).run()
    return {}


def _move(folder: Path, target: Path) -> None:
    """Put a task's files among those of all tasks, each in one step."""
    for path in folder.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)


def unique(
    job: Job, part: int, rows: Iterable[Document | Drop]
) -> Iterator[Document | Drop]:
    """Yield the rows of a part with a Drop for each near-duplicate of another."""
    # There is none without the phases of near-duplicates, or for a part that has none.
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
    allow_many_files()  # it opens one of every part at once


BINS = 2**14
SAMPLE_BYTES = 16_000_000  # of input whose tokens are counted, for tokens per byte
LONGEST_FIELD = 2**31 - 1  # characters of a field of a proportion table
BINS_FILE = "bins.npz"
# The columns of a proportion table.
COLUMNS = {"bytes": ("bytes", "characters"), "files": ("files", "documents")}


def bin_of(seed: int, id: str) -> int:
    """Return the document's bin, 0 <= bin < BINS, uniform over ids."""
    return hash64(seed, "choose", id) >> 50


@dataclass
class Measure:
    """The size of a language: files and bytes by bin, tokens and bytes of a sample."""

    files: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    bytes: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    sample_tokens: int = 0
    sample_bytes: int = 0

    def add(self, other: "Measure") -> None:
        """Add another part's measure."""
        self.files += other.files
        self.bytes += other.bytes
        self.sample_tokens += other.sample_tokens
        self.sample_bytes += other.sample_bytes


@dataclass(frozen=True)
class Chosen:
    """One language's part of the budget."""

    threshold: int  # bins below it are chosen
    share: float  # of the budget, by the settings
    exhausted: bool  # it had less than its share


def choose(
    measures: Mapping[str, Measure],
    shares: Mapping[str, float],
    *,
    tokens: float,
    by: str,
) -> dict[str, Chosen]:
    """Return thresholds that choose `tokens`, `shares` of it in bytes or files (`by`).

    Shares of languages without data are spread over the others. A language that has less
    than its share is taken whole, and the others fill the budget. Nothing is taken of a
    language whose share is 0.
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
        return float(
            sum(costs[name][place] for name, place in thresholds(scale).items())
        )

    low = 0.0
    whole = (filled[name][-1] / share for name, share in known.items() if share)
    high = max(whole, default=0.0)
    if cost(high) > tokens:
        for _ in range(64):
            middle = (low + high) / 2
            if cost(middle) <= tokens:
                low = middle
            else:
                high = middle
        if tokens - cost(low) <= cost(high) - tokens:
            high = low
    result: dict[str, Chosen] = {}
    for name, place in thresholds(high).items():
        all_taken = place == BINS and filled[name][-1] < 0.99 * high * known[name]
        result[name] = Chosen(
            threshold=place,
            share=known[name],
            exhausted=bool(all_taken),
        )
    return result


def _tokens_per_byte(measures: Mapping[str, Measure], name: str) -> float:
    """Return a language's tokens per byte, those of all languages without a sample."""
    own = measures[name]
    sampled = [own] if own.sample_bytes else list(measures.values())
    sample_bytes = sum(measure.sample_bytes for measure in sampled)
    sample_tokens = sum(measure.sample_tokens for measure in sampled)
    return sample_tokens / sample_bytes if sample_bytes else 0.25


def _cumulated(sizes: np.ndarray) -> np.ndarray:
    return np.cumsum(np.append(0, sizes))


def _nearest(cumulated: np.ndarray, target: float) -> int:
    """Return the index of the value that is nearest to the target."""
    above = min(int(np.searchsorted(cumulated, target)), len(cumulated) - 1)
    below = max(above - 1, 0)
    return above if cumulated[above] - target <= target - cumulated[below] else below


def own_shares(measures: Mapping[str, Measure], by: str) -> dict[str, float]:
    """Return each language's share of the data's own files or bytes."""
    sizes = {name: float(getattr(own, by).sum()) for name, own in measures.items()}
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items() if size}


def read_table(config: DataPrepConfig) -> dict[str, float]:
    """Return each language's size: the CSV file's first column, and bytes or files."""
    columns = COLUMNS[config.proportion.by]
    csv.field_size_limit(LONGEST_FIELD)  # Python's own is 131,072 characters
    refusing = Refusing(
        f"proportion.table={config.proportion.table} must be a CSV file with languages "
        f"and a column {columns[0]} or {columns[1]} of sizes from 0 on, got"
    )
    with refusing, open(str(config.proportion.table), encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
        column = next(name for name in columns if rows and name in rows[0])
        sizes = {next(iter(row.values())): float(row[column]) for row in rows}
        wrong = {name: size for name, size in sizes.items() if not 0 <= size < math.inf}
        if wrong:
            raise ValueError(str(wrong))
    return sizes


def measure(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Count a part's documents by language and bin, as far as they pass the filters."""
    config = job.config
    measures: defaultdict[str, Measure] = defaultdict(Measure)
    sample: list[Document] = []
    rate = min(1.0, SAMPLE_BYTES / max(1, sum(part.size for part in job.parts)))
    for document in documents_of(job.screened(unique(job, part, job.rows(part)))):
        counted = measures[document.language]
        size = len(document.text.encode())
        place = bin_of(config.seed, document.id)
        counted.files[place] += 1
        counted.bytes[place] += size
        if unit(config.seed, "sample", document.id) < rate:
            sample += split(document, config.data.split_chars)
            counted.sample_bytes += size
    # All at once: every call of the encoder that meets new words copies its table.
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
    """Add up the parts' measures and find each language's threshold."""
    tokens = job.config.budget_tokens
    assert tokens is not None
    measures: defaultdict[str, Measure] = defaultdict(Measure)
    for part in range(len(job.parts)):
        bins = np.load(job.done("measure", part) / BINS_FILE)
        languages = job.read_facts("measure", part)["languages"]
        # Indexing an archive reads it: once, not for every language.
        rows = zip(languages.items(), bins["files"], bins["bytes"])
        for (name, sampled), files, sizes in rows:
            measures[name].add(Measure(files, sizes, *sampled))
    by = job.config.proportion.by
    shares = job.plan["shares"] or own_shares(measures, by)
    chosen = choose(measures, shares, tokens=tokens, by=by)
    return {"chosen": {name: asdict(part) for name, part in sorted(chosen.items())}}


def chosen(
    job: Job, rows: Iterable[Document | Drop], counts: Counter[str]
) -> Iterator[Document | Drop]:
    """Yield the rows whose documents the budget takes; count the others."""
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
        # No document of a language without a threshold passes the filters.
        elif bin_of(job.config.seed, row.id) < thresholds.get(row.language, BINS):
            yield row
        else:
            counts["not chosen"] += 1
