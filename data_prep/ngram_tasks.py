"""Make the n-gram table in three phases: count slices of shards, merge ranges of tokens, select contexts.

    count     count the n-grams of a slice (at most SLICE tokens of a shard), in ascending order
    merge     merge all slices for a range of latest tokens; keep contexts with positive gain
    select    write the best contexts of all ranges that fit in the size limit to one file

Slices and ranges depend only on the shards, so the output does not depend on the workers. All
contexts with the same latest token are in one range, together with their backoff contexts. A
token that is too frequent has its own range: its bigrams are counted first, then its contexts
are merged by ranges of the token before it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from conf.runs.fingerprint import fingerprint_file
from data_prep.config import NgramsConfig
from data_prep.job import Job
from data_prep.ngrams import (
    FORMAT,
    TABLE,
    Contexts,
    NgramCounts,
    Packing,
    best_of,
    count_ngrams,
    descend,
    interpolate,
    merge,
    no_contexts,
    score_contexts,
    score_levels,
    table_size,
    table_tensors,
    write_table,
)
from data_prep.shards import save_array
from data_prep.vocab import TOKENIZER, Vocab

CONTEXTS = "contexts.npz"
SLICE = 2**22  # largest number of tokens that a task counts
# Counting more tokens improves the table little. 1B tokens at order 4 take 5 minutes of a
# core, 0.5 GB of memory per worker and 10 GB of temporary disk space.
COUNTED_TOKENS = 1_000_000_000
# Tokens in the n-grams that a task merges; more only if they share their two latest tokens.
RANGE = 2**24


class Slice(NamedTuple):
    """Sequences of a shard, by row."""

    shard: int
    rows: np.ndarray  # (n,) int64


def slices(job: Job) -> list[Slice]:
    """Return the slices to count: all sequences, or evenly spaced ones with COUNTED_TOKENS tokens."""
    count = job.read_facts("tally")["train"]["shards"]
    shards = [job.read_facts("pack", task) for task in range(count)]
    sequences = sum(shard["sequences"] for shard in shards)
    tokens = sum(shard["tokens"] for shard in shards)
    counted = min(sequences, sequences * COUNTED_TOKENS // max(1, tokens))
    longest = max(1, SLICE // job.config.seq_len)
    tasks: list[Slice] = []
    start = 0
    for index, shard in enumerate(shards):
        numbers = np.arange(start, start + shard["sequences"] + 1)
        start += shard["sequences"]
        rows = np.flatnonzero(np.diff(numbers * counted // max(1, sequences)))
        parts = np.split(rows, range(longest, len(rows), longest))
        tasks += [Slice(index, part) for part in parts if len(part)]
    return tasks


def count_slice(job: Job, task: int, folder: Path) -> dict[str, Any]:
    """Count the n-grams and unigrams of a slice, and save them as arrays."""
    part = slices(job)[task]
    packing = _packing(job)
    stem = job.done("pack", part.shard) / f"train-{part.shard:05d}"
    shard = np.load(f"{stem}.tokens.npy", mmap_mode="r")
    spans = np.load(f"{stem}.spans.npy", mmap_mode="r")
    used = spans["stop"][
        np.searchsorted(spans["sequence"], part.rows, side="right") - 1
    ]
    sequences = [
        shard[row][:stop]
        for row, stop in zip(part.rows.tolist(), used.tolist(), strict=True)
    ]
    ngrams = count_ngrams(sequences, packing)
    save_array(folder / "words.npy", ngrams.words)
    save_array(folder / "counts.npy", ngrams.counts.astype(np.uint32))
    unigrams = np.bincount(ngrams.successors, ngrams.counts, packing.vocabulary)
    save_array(folder / "unigrams.npy", unigrams.astype(np.int64))
    return {"tokens": int(used.sum()), "ngrams": len(ngrams.counts)}


def ranges(sizes: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Divide indices into ranges (start, stop) with a total size of at most `limit` each.

    An index with a size above the limit is a separate range.
    """
    bounds = []
    start = 0
    total = 0
    for index, size in enumerate(sizes.tolist()):
        if total and total + size > limit:
            bounds.append((start, index))
            start = index
            total = 0
        total += size
    return [*bounds, (start, len(sizes))] if total else bounds


def merge_range(job: Job, task: int, folder: Path) -> dict[str, Any]:
    """Save the contexts of a range of latest tokens with positive gain, the best that fit the budget."""
    unigrams = count_unigrams(job)
    low, high = ranges(unigrams, _limit(job))[task]
    packing = _packing(job)
    contexts = no_contexts()
    for part in _score_range(job, packing, low, high, unigrams):
        contexts = best_of(contexts, part, _budget(job, packing), packing.vocabulary)
    with open(folder / CONTEXTS, "wb") as file:
        np.savez(file, allow_pickle=False, **contexts.arrays())
    return {"contexts": len(contexts.keys)}


def _score_range(
    job: Job, packing: Packing, low: int, high: int, unigrams: np.ndarray
) -> Iterator[Contexts]:
    """Yield the contexts of a range with positive gain, order by order."""
    if unigrams[low:high].sum() <= _limit(job):
        levels = descend(_read(job, packing, packing.bound(low), packing.bound(high)))
        bigrams = levels[-1][0]
        parts = iter([levels])
    else:
        bigrams, before = _bigrams(job, packing, low)
        parts = (
            descend(
                _read(job, packing, packing.bound(low, start), packing.bound(low, stop))
            )
            for start, stop in ranges(before, _limit(job))
        )
    backoff = (unigrams / unigrams.sum())[bigrams.successors]
    probabilities = interpolate(bigrams, backoff)
    yield score_contexts(bigrams, probabilities, backoff)
    for levels in parts:
        yield from score_levels(levels, bigrams, probabilities)


def _read(job: Job, packing: Packing, low: int, high: int) -> NgramCounts:
    """Return the merged n-grams of all slices with first words in low:high."""
    parts: list[NgramCounts] = []
    for part in _read_slices(job, packing, low, high):
        parts.append(part)
        if sum(len(other.counts) for other in parts) > 2 * _limit(job):
            parts = [merge(parts)]
    return merge(parts)


def _read_slices(
    job: Job, packing: Packing, low: int, high: int
) -> Iterator[NgramCounts]:
    """Yield the n-grams of each slice with first words in low:high."""
    for task in range(len(slices(job))):
        folder = job.done("count", task)
        words = np.load(folder / "words.npy", mmap_mode="r")
        start, stop = np.searchsorted(words[0], np.array([low, high], np.uint64))
        counts = np.load(folder / "counts.npy", mmap_mode="r")[start:stop].astype(
            np.int64
        )
        yield NgramCounts(packing, np.array(words[:, start:stop]), counts)


def _bigrams(job: Job, packing: Packing, latest: int) -> tuple[NgramCounts, np.ndarray]:
    """Return the bigrams of a latest token, and (V + 1,) counts of n-grams by the token before it."""
    successors = np.zeros(packing.vocabulary)
    before = np.zeros(packing.vocabulary + 1, np.int64)
    bounds = packing.bound(latest), packing.bound(latest + 1)
    for part in _read_slices(job, packing, *bounds):
        successors += np.bincount(part.successors, part.counts, len(successors))
        if packing.order > 2:
            before += np.bincount(part.token(1).astype(np.int64), minlength=len(before))
    ids = np.flatnonzero(successors)
    own = Packing(2, packing.vocabulary)
    words = own.pack([np.full(len(ids), latest), ids])
    return NgramCounts(own, words, successors[ids].astype(np.int64)), before


def select(job: Job, _: int, folder: Path) -> dict[str, Any]:
    """Write the table with the contexts of the best gain per byte from all ranges."""
    unigrams = count_unigrams(job)
    packing = _packing(job)
    budget = _budget(job, packing)
    contexts = no_contexts()
    for task in range(range_count(job)):
        with np.load(job.done("merge", task) / CONTEXTS) as part:
            contexts = best_of(contexts, Contexts(**part), budget, packing.vocabulary)
    contexts = contexts.best(budget, packing.vocabulary)
    tokens = int(unigrams.sum())
    metadata = {
        "format": FORMAT,
        "order": str(packing.order),
        "vocabulary": str(packing.vocabulary),
        "tokens": str(tokens),
        "tokenizer": fingerprint_file(job.folder / TOKENIZER / "tokenizer.json"),
    }
    path = folder / TABLE
    write_table(path, table_tensors(contexts, unigrams, packing.order), metadata)
    orders = range(2, packing.order + 1)
    return {
        "order": packing.order,
        "tokens": tokens,
        "contexts": {
            str(order): int((contexts.orders == order).sum()) for order in orders
        },
        "bytes": path.stat().st_size,
    }


def count_unigrams(job: Job) -> np.ndarray:
    """Return the (V,) int64 counts of the ids."""
    total = np.zeros(_packing(job).vocabulary, np.int64)
    for task in range(len(slices(job))):
        total += np.load(job.done("count", task) / "unigrams.npy")
    return total


def range_count(job: Job) -> int:
    """Return the number of ranges; 0 for order 1."""
    return (
        len(ranges(count_unigrams(job), _limit(job)))
        if job.config.ngrams.order > 1
        else 0
    )


def needs_table(job: Job) -> bool:
    """Return True if the settings ask for an n-gram table."""
    return job.config.ngrams.megabytes > 0


def check_size(config: NgramsConfig, vocab: Vocab) -> None:
    """Raise UserError if the n-gram table cannot hold the unigrams of the vocabulary."""
    size = table_size(Packing(config.order, vocab.text_size))
    least = -(-size // 10**6)
    if 0 < config.megabytes < least:
        raise UserError(
            f"ngrams.megabytes must be at least {least} for {vocab.text_size:,} ids, got "
            f"{config.megabytes}. Raise it, or set ngrams.megabytes=0 for no table."
        )


def _packing(job: Job) -> Packing:
    return Packing(job.config.ngrams.order, job.vocab.text_size)


def _limit(job: Job) -> int:
    """Return the number of n-grams to merge at once."""
    return RANGE // job.config.ngrams.order


def _budget(job: Job, packing: Packing) -> int:
    """Return the bytes that the size limit leaves for contexts."""
    return job.config.ngrams.megabytes * 10**6 - table_size(packing)
