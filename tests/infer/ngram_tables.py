"""Helpers: n-gram tables, and the slow reference with dictionaries and dense vectors."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from data_prep.ngrams import FORMAT, hash_contexts, id_dtype, write_table
from infer.ngrams import NgramTable, NgramWeights

Counts = Mapping[tuple[int, ...], Counter[int]]  # by context, the oldest token first


def count_ngrams(texts: Sequence[Sequence[int]], contexts: Iterable[int]) -> Counts:
    """Return how often each token followed each context of these lengths."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for length in contexts:
            for end in range(length, len(text)):
                counts[tuple(text[end - length : end])][text[end]] += 1
    return counts


def columns(
    length: int, rows: Sequence[tuple[int, int, list[tuple[int, int]]]]
) -> dict[str, list[int]]:
    """Return the tensors of the contexts of one length, as lists.

    A row is a context's key and total, and its successors with their counts.
    """
    pairs = [pair for _, _, successors in rows for pair in successors]
    ends = itertools.accumulate(len(successors) for _, _, successors in rows)
    o = length + 1
    return {
        f"keys_{o}": [key for key, _, _ in rows],
        f"totals_{o}": [total for _, total, _ in rows],
        f"first_{o}": [0, *ends],
        f"ids_{o}": [token for token, _ in pairs],
        f"counts_{o}": [count for _, count in pairs],
    }


def make_table(
    path: Path, texts: Sequence[Sequence[int]], *, order: int, vocabulary: int
) -> NgramTable:
    """Write and read the table of all n-grams of these texts."""
    unigrams = np.bincount(
        [token for text in texts for token in text], minlength=vocabulary
    )
    tensors: dict[str, Any] = {"unigrams": unigrams}
    for length in range(1, order):
        rows = []
        for context, successors in count_ngrams(texts, [length]).items():
            key = hash_contexts([np.array([token]) for token in reversed(context)])
            rows.append((int(key[0]), successors.total(), successors.most_common()))
        tensors |= columns(length, sorted(rows))
    return save(path, tensors, order=order, vocabulary=vocabulary)


def make_random_table(
    path: Path, *, order: int, vocabulary: int, seed: int
) -> NgramTable:
    """Write and read a table of random contexts, successors and counts."""
    rng = np.random.default_rng(seed)
    tensors = {"unigrams": rng.integers(0, 9, vocabulary)}
    for o in range(2, order + 1):
        tokens = rng.integers(0, vocabulary, (o - 1, 400))
        keys = np.unique(hash_contexts(list(tokens)))
        sizes = rng.integers(0, 9, len(keys))
        tensors |= {
            f"ids_{o}": rng.integers(0, vocabulary, sizes.sum()),
            f"keys_{o}": keys,
            f"totals_{o}": rng.integers(0, 9, len(keys)),
            f"first_{o}": np.concatenate([[0], np.cumsum(sizes)]),
            f"counts_{o}": rng.integers(0, 2**32, sizes.sum()),
        }
    return save(path, tensors, order=order, vocabulary=vocabulary)


def save(
    path: Path, tensors: Mapping[str, ArrayLike], *, order: int, vocabulary: int
) -> NgramTable:
    """Write and read a table."""
    dtypes = {"keys": np.uint64, "ids": id_dtype(vocabulary)}
    arrays = {
        name: np.array(values, dtypes.get(name.split("_")[0], np.uint32))
        for name, values in tensors.items()
    }
    described = {"format": FORMAT, "tokenizer": "0" * 64, "tokens": "0"}
    described |= {"order": str(order), "vocabulary": str(vocabulary)}
    write_table(path, arrays, described)
    return NgramTable(path)


def interpolate(
    u_V: np.ndarray,
    tail: Sequence[int],
    counts: Counts,
    lengths: Sequence[int],
    κ: float,
) -> np.ndarray:
    """Return (V,) p_o = (count_o + κ p_{o-1}) / (n_o + κ) after `tail`, beginning with `u_V`."""
    p_V = u_V
    for length in lengths:
        successors = counts.get(tuple(tail[-length:]))
        if successors and length <= len(tail):
            count_V = np.array([successors[token] for token in range(len(u_V))])
            p_V = (count_V + κ * p_V) / (count_V.sum() + κ)
    return p_V


def smoothed(texts: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """Return the unigrams (V,), with 1 added to each count."""
    count_V = 1 + np.bincount(
        [token for text in texts for token in text], minlength=vocabulary
    )
    return count_V / count_V.sum()


def slow_successors(
    data: Sequence[Sequence[int]],
    text: Sequence[int],
    tail: Sequence[int],
    order: int,
    vocabulary: int,
    weights: NgramWeights,
    text_contexts: Sequence[int],
) -> np.ndarray:
    """Return (V,) p_ngram after `tail`, by the counts of the data and of the text."""
    u_V = smoothed(data, vocabulary) if data else np.full(vocabulary, 1 / vocabulary)
    by_table = count_ngrams(data, range(1, order))
    p_V = interpolate(u_V, tail, by_table, range(1, order), weights.table)
    return interpolate(
        p_V, tail, count_ngrams([text], text_contexts), text_contexts, weights.text
    )
