"""Tables of n-grams, and the slow reference: dictionaries and dense vectors."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

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


def make_table(
    path: Path, texts: Sequence[Sequence[int]], *, order: int, vocabulary: int
) -> NgramTable:
    """Write and read the table of all n-grams of these texts."""
    counts = count_ngrams(texts, range(1, order))
    unigrams = np.bincount(
        [token for text in texts for token in text], minlength=vocabulary
    ).astype(np.uint32)
    tensors = {"unigrams": unigrams}
    for length in range(1, order):
        rows = []
        for context, successors in counts.items():
            if len(context) == length:
                columns = [np.array([token]) for token in reversed(context)]
                key = int(hash_contexts(columns)[0])
                rows.append((key, successors.most_common()))
        rows.sort()
        pairs = [pair for _, successors in rows for pair in successors]
        lengths = [len(successors) for _, successors in rows]
        totals = [sum(n for _, n in successors) for _, successors in rows]
        o = length + 1
        tensors |= {
            f"keys_{o}": np.array([key for key, _ in rows], np.uint64),
            f"totals_{o}": np.array(totals, np.uint32),
            f"first_{o}": np.cumsum([0, *lengths]).astype(np.uint32),
            f"ids_{o}": np.array([token for token, _ in pairs], id_dtype(vocabulary)),
            f"counts_{o}": np.array([n for _, n in pairs], np.uint32),
        }
    return save(path, tensors, order=order, vocabulary=vocabulary)


def make_random_table(
    path: Path, *, order: int, vocabulary: int, seed: int
) -> NgramTable:
    """Write and read a table of random contexts, successors and counts."""
    rng = np.random.default_rng(seed)
    tensors = {"unigrams": rng.integers(0, 9, vocabulary).astype(np.uint32)}
    for o in range(2, order + 1):
        tokens = rng.integers(0, vocabulary, (o - 1, 400))
        keys = np.unique(hash_contexts(list(tokens)))
        sizes = rng.integers(0, 9, len(keys))
        ids = rng.integers(0, vocabulary, sizes.sum())
        tensors |= {
            f"keys_{o}": keys,
            f"totals_{o}": rng.integers(0, 9, len(keys)).astype(np.uint32),
            f"first_{o}": np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint32),
            f"ids_{o}": ids.astype(id_dtype(vocabulary)),
            f"counts_{o}": rng.integers(0, 2**32, sizes.sum()).astype(np.uint32),
        }
    return save(path, tensors, order=order, vocabulary=vocabulary)


def save(
    path: Path, tensors: Mapping[str, np.ndarray], **metadata: object
) -> NgramTable:
    """Write and read a table."""
    described = {"format": FORMAT, "tokenizer": "0" * 64, "tokens": "0"}
    described |= {name: str(value) for name, value in metadata.items()}
    write_table(path, tensors, described)
    return NgramTable(path)


def interpolate(
    u_V: np.ndarray,
    tail: Sequence[int],
    counts: Counts,
    lengths: Sequence[int],
    κ: float,
) -> np.ndarray:
    """Return (V,) p_o = (count_o + κ p_{o-1}) / (n_o + κ) behind `tail`, from `u_V` on."""
    p_V = u_V
    for length in lengths:
        successors = counts.get(tuple(tail[-length:]))
        if successors and length <= len(tail):
            count_V = np.array([successors[token] for token in range(len(u_V))])
            p_V = (count_V + κ * p_V) / (count_V.sum() + κ)
    return p_V


def smoothed(texts: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """Return (V,) the unigrams, each counted once more than it is there."""
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
    """Return (V,) p_ngram behind `tail`, by the counts of the data and of the text."""
    u_V = smoothed(data, vocabulary) if data else np.full(vocabulary, 1 / vocabulary)
    by_table = count_ngrams(data, range(1, order))
    p_V = interpolate(u_V, tail, by_table, range(1, order), weights.table)
    return interpolate(
        p_V, tail, count_ngrams([text], text_contexts), text_contexts, weights.text
    )
