"""Which of all documents are taken: one of each cluster of near-duplicates, and what a budget takes of these.

Near-duplicates are found by datatrove's MinHash: 14 buckets of 8 hashes of 5-grams of words, which finds pairs
of similarity 0.8 with probability 0.92. Three phases come before the filter: signatures of a part, pairs in a
bucket, clusters of all.

A budget is met in proportion to the languages (SDSAT §3.1). Every document has a bin, from a hash of the seed
and its id. The bins' sizes are counted once; a language's threshold is the bin up to which its documents fill
its share. So a document is chosen or not by its id alone, with no shuffle and no state, and the shares are met
as closely as one bin allows. Two phases: every part is measured, the thresholds are chosen.
"""

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conf import UserError
from conf.files import allow_many_files
from data_prep.config import DataPrepConfig
from data_prep.document import Document, Drop, documents_of, hash64, split, unit
from data_prep.encode import encode
from data_prep.job import Job

BUCKETS = 14  # datatrove's default
SIGNED_CHARS = (
    100_000  # of a document, since the library holds 112 hashes of every word at once
)
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
    path = job.done("cluster") / f"{part:06d}.remove"
    if not job.config.near_duplicates or not path.is_file():
        yield from rows
        return
    signed = job.read_facts("sign", part)["rows"]
    removed = {
        tuple(signed[index]) for index in np.fromfile(path, dtype="<u4").tolist()
    }
    for row in rows:
        duplicate = isinstance(row, Document) and (row.file, row.row) in removed
        yield (
            row.drop("near-duplicate")
            if isinstance(row, Document) and duplicate
            else row
        )


def _prepare_library() -> None:
    from loguru import logger

    logger.disable("datatrove")
    allow_many_files()  # it opens one of every part at once


BINS = 2**14
SAMPLE_BYTES = 16_000_000  # of input whose tokens are counted, to know a language's tokens per byte
LONGEST_FIELD = 2**31 - 1  # characters of a field of a proportion table
BINS_FILE = "bins.npz"
COLUMNS = {
    "bytes": ("bytes", "characters"),
    "files": ("files", "documents"),
}  # of a proportion table


def bin_of(seed: int, id: str) -> int:
    """Return the document's bin, 0 <= bin < BINS, uniform over ids."""
    return hash64(seed, "choose", id) >> 50


@dataclass
class Measure:
    """What one language has: files and bytes by bin, and tokens per byte from a sample."""

    files: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    bytes: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    sample_tokens: int = 0
    sample_bytes: int = 0

    def __iadd__(self, other: "Measure") -> "Measure":
        self.files += other.files
        self.bytes += other.bytes
        self.sample_tokens += other.sample_tokens
        self.sample_bytes += other.sample_bytes
        return self


@dataclass(frozen=True)
class Chosen:
    """One language's part of the budget."""

    threshold: int  # bins below it are chosen
    share: float  # of the budget, by the settings
    files: int  # expected
    bytes: int
    exhausted: bool  # it had less than its share


def choose(
    measures: Mapping[str, Measure],
    shares: Mapping[str, float],
    *,
    amount: float,
    by: str,
    unit: str,
) -> dict[str, Chosen]:
    """Return thresholds that take `amount` tokens or bytes (`unit`), `shares` of it, `by` bytes or files, each.

    `shares` of languages without data are spread over the others; a language that has less than its share is
    taken whole, and the others fill the budget. Of one whose share is 0 nothing is taken.
    """
    left_out = {
        name for name, share in shares.items() if name in measures and share == 0
    }
    known = {
        language: share
        for language, share in shares.items()
        if language in measures and share > 0
    }
    total = sum(known.values())
    shares = {language: share / total for language, share in known.items()}
    filled = {name: _cumulated(getattr(measures[name], by)) for name in known}
    costs = {
        name: _cumulated(measures[name].bytes * _rate(measures, name, unit))
        for name in known
    }

    def thresholds(scale: float) -> dict[str, int]:
        return {name: _nearest(filled[name], scale * shares[name]) for name in known}

    def cost(scale: float) -> float:
        return sum(
            costs[name][threshold] for name, threshold in thresholds(scale).items()
        )

    low = 0.0
    high = max((filled[name][-1] / shares[name] for name in known), default=0.0)
    if cost(high) > amount:
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(middle) <= amount else (low, middle)
        high = low if amount - cost(low) <= cost(high) - amount else high
    return {name: Chosen(0, 0.0, 0, 0, exhausted=False) for name in left_out} | {
        name: Chosen(
            threshold,
            shares[name],
            int(measures[name].files[:threshold].sum()),
            int(measures[name].bytes[:threshold].sum()),
            exhausted=bool(
                threshold == BINS and filled[name][-1] < 0.99 * high * shares[name]
            ),
        )
        for name, threshold in thresholds(high).items()
    }


def _rate(measures: Mapping[str, Measure], name: str, unit: str) -> float:
    """Return units per byte; a language without a sample has the rate of all."""
    if unit == "bytes":
        return 1.0
    sampled = (
        [measures[name]] if measures[name].sample_bytes else list(measures.values())
    )
    sample_bytes = sum(measure.sample_bytes for measure in sampled)
    return (
        sum(measure.sample_tokens for measure in sampled) / sample_bytes
        if sample_bytes
        else 0.25
    )


def _cumulated(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)])


def _nearest(cumulated: np.ndarray, target: float) -> int:
    """Return the place whose value is nearest to the target."""
    above = min(int(np.searchsorted(cumulated, target)), len(cumulated) - 1)
    below = max(above - 1, 0)
    return above if cumulated[above] - target <= target - cumulated[below] else below


def own_shares(measures: Mapping[str, Measure], by: str) -> dict[str, float]:
    """Return each language's share of the data's own files or bytes."""
    sizes = {
        language: float(getattr(measure, by).sum())
        for language, measure in measures.items()
    }
    total = sum(sizes.values())
    return {language: size / total for language, size in sizes.items() if size}


def read_table(config: DataPrepConfig) -> dict[str, float]:
    """Return languages and their sizes from the user's CSV file: its first column and the one of bytes or
    files.

    Raises UserError for a file that is no such table.
    """
    path = str(config.proportion.table)
    by = config.proportion.by
    csv.field_size_limit(LONGEST_FIELD)  # Python's own is 131,072 characters
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        column = next(name for name in COLUMNS[by] if rows and name in rows[0])
        sizes = {next(iter(row.values())): float(row[column]) for row in rows}
        for language, size in sizes.items():
            if not 0 <= size < math.inf:
                raise ValueError(f"{column}={size:g} of {language}")
        return sizes
    except (OSError, ValueError, TypeError, StopIteration, csv.Error) as error:
        columns = f"languages and a column '{COLUMNS[by][0]}' or '{COLUMNS[by][1]}'"
        raise UserError(
            f"proportion.table={path} must be a CSV file with {columns}, got {error or 'none'}"
        ) from error


def measure(job: Job, part: int, folder: Path) -> dict[str, Any]:
    """Count a part's documents by language and bin, as far as they pass the screen."""
    config = job.config
    measures: dict[str, Measure] = {}
    sample: list[Document] = []
    rate = min(1.0, SAMPLE_BYTES / max(1, sum(part.size for part in job.parts)))
    for document in documents_of(job.screened(unique(job, part, job.rows(part)))):
        counted = measures.setdefault(document.language, Measure())
        size = len(document.text.encode())
        place = bin_of(config.seed, document.id)
        counted.files[place] += 1
        counted.bytes[place] += size
        if (
            config.proportion.unit == "tokens"
            and unit(config.seed, "sample", document.id) < rate
        ):
            sample += split(document, config.data.split_chars)
            counted.sample_bytes += size
    # In batches: every call of the encoder that meets new words copies its table of words.
    for document, _, ids in (
        encode(sample, config, job.vocab, job.encoder) if sample else ()
    ):
        measures[document.language].sample_tokens += len(ids)
    files, sizes = (
        [getattr(m, kind) for m in measures.values()] for kind in ("files", "bytes")
    )
    np.savez_compressed(
        folder / BINS_FILE, files=np.array(files), bytes=np.array(sizes)
    )
    return {
        "languages": {
            name: [m.sample_tokens, m.sample_bytes] for name, m in measures.items()
        }
    }


def choose_documents(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Add up what was measured and find each language's threshold."""
    config = job.config
    amount = job.config.budget_amount
    assert amount is not None
    measures: dict[str, Measure] = {}
    for part in range(len(job.parts)):
        bins = np.load(job.done("measure", part) / BINS_FILE)
        listed = job.read_facts("measure", part)["languages"]
        # Indexing an archive reads it: once, not for every language.
        for (name, (tokens, size)), files, byte_counts in zip(
            listed.items(), bins["files"], bins["bytes"]
        ):
            total = measures.setdefault(name, Measure())
            total += Measure(files, byte_counts, tokens, size)
    by = config.proportion.by
    shares = job.plan["shares"] or own_shares(measures, by)
    chosen = choose(measures, shares, amount=amount, by=by, unit=config.proportion.unit)
    return {"chosen": {name: asdict(part) for name, part in sorted(chosen.items())}}


def chosen(
    job: Job, rows: Iterable[Document | Drop], counts: Counter[str]
) -> Iterator[Document | Drop]:
    """Yield the rows whose documents the budget takes; the others are counted."""
    if job.config.budget is None:
        yield from rows
        return
    thresholds = {
        name: part["threshold"]
        for name, part in job.read_facts("choose")["chosen"].items()
    }
    for row in rows:
        if isinstance(row, Drop):
            yield row
        elif job.plan["shares"] is not None and row.language not in job.plan["shares"]:
            yield row.drop("unknown language", row.language)
        # A language without a threshold had no document that passes the screen: the screen gives the reason.
        elif bin_of(job.config.seed, row.id) < thresholds.get(row.language, BINS):
            yield row
        else:
            counts["not chosen"] += 1
