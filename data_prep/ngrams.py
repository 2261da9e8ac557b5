"""Count n-grams of the training data, select contexts by gain, and write the table for decoders.

An n-gram of order o is a context of o - 1 tokens and a successor. In memory it is packed
into 64-bit words, latest token first, so that contexts with the same latest tokens are
neighbours in ascending order:

    latest, the token before, ..., oldest, successor     `bits` bits each, never split over words

At the start of a sequence, contexts are padded with the id V. So the n-grams of the highest
order also give all lower orders: without its oldest token, an n-gram is an n-gram of the next
lower order.

The file is safetensors. Its metadata has `format`, `order`, `vocabulary` (V), `tokens`
(counted), `tokenizer` (SHA-256 of tokenizer.json) and `sha256` (of the tensors' bytes, in
the order of the file). Its tensors:

    unigrams         (V,) uint32        counts of the ids
    and for each order o from 2 on, with n_o contexts that have m_o successors:
    keys_o           (n_o,) uint64      `hash_contexts` of the contexts, ascending
    totals_o         (n_o,) uint32      occurrences of the context, with any successor
    first_o          (n_o + 1,) uint32  context i has successors first_o[i]:first_o[i + 1]
    ids_o            (m_o,) uint16      successors, the likeliest first; uint32 if V > 65536
    counts_o         (m_o,) uint32      counts of the successors

Counts saturate at 2**32 - 1.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from conf.errors import UserError, in_one_line
from conf.runs.fingerprint import fingerprint_file

TABLE = "ngrams.safetensors"
FORMAT = "adaptive-tokens ngrams 1"
MULTIPLIER = 0x9E3779B97F4A7C15
HEADER_BYTES = 2**20  # largest JSON header of a file
SUCCESSORS = 8  # largest number of successors of a context
LARGEST = 16 + 8 * SUCCESSORS  # largest size of a context in the file, in bytes
STRENGTH = 2.0  # the weight k of the backoff p_{o-1} in p_o
DTYPES = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "U64": np.dtype("<u8")}


def hash_contexts(tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Return the (n,) uint64 keys of n contexts.

    `tokens` are (n,) arrays, latest tokens first. h = 0; for each token t:
    h = ((h + t + 1) * MULTIPLIER) mod 2**64. So the key of a context is an intermediate value
    in the computation for a longer context.
    """
    keys = np.zeros(len(tokens[0]), np.uint64)
    for column in tokens:
        keys = (keys + column.astype(np.uint64) + np.uint64(1)) * np.uint64(MULTIPLIER)
    return keys


@dataclass(frozen=True)
class Packing:
    """The layout of an n-gram's tokens in 64-bit words; the last word may contain fewer tokens."""

    order: int
    vocabulary: int  # V, which is also the id of padding

    @property
    def bits(self) -> int:
        """The number of bits that hold one token."""
        return self.vocabulary.bit_length()

    @property
    def words(self) -> int:
        """The number of 64-bit words that hold one n-gram."""
        return -(-self.order // (64 // self.bits))

    def pack(self, tokens: Sequence[np.ndarray]) -> np.ndarray:
        """Return the (words, n) uint64 words of n n-grams.

        `tokens` are (n,) arrays in the order of the layout, from the latest token to the successor.
        """
        per = 64 // self.bits
        bits = np.uint64(self.bits)
        words = np.zeros((self.words, len(tokens[0])), np.uint64)
        for index, column in enumerate(tokens):
            words[index // per] <<= bits
            words[index // per] |= column.astype(np.uint64, copy=False)
        return words

    def token(self, words: np.ndarray, index: int) -> np.ndarray:
        """Return the (n,) tokens at an index: 0 is the latest, order - 1 the successor."""
        per = 64 // self.bits
        # The last token in the same word.
        last = min(self.order, (index // per + 1) * per) - 1
        shift = np.uint64((last - index) * self.bits)
        result: np.ndarray = words[index // per] >> shift & np.uint64(2**self.bits - 1)
        return result

    def contexts(self, words: np.ndarray) -> np.ndarray:
        """Return the packed contexts: the n-grams without their last token, the successor."""
        return np.concatenate([words[:-1], words[-1:] >> np.uint64(self.bits)])

    def bound(self, latest: int, before: int = 0) -> int:
        """Return the smallest first word of n-grams with contexts that end in `before`, `latest`."""
        rest = min(self.order, 64 // self.bits) - 2
        return ((latest << self.bits) + before) << rest * self.bits


@dataclass(frozen=True)
class NgramCounts:
    """Distinct n-grams of one order in ascending order."""

    packing: Packing
    words: np.ndarray  # (words, n) uint64
    counts: np.ndarray  # (n,) int64

    def token(self, index: int) -> np.ndarray:
        """Return the (n,) tokens at an index of the layout."""
        return self.packing.token(self.words, index)

    @property
    def successors(self) -> np.ndarray:
        """The (n,) int64 ids of the successors."""
        return self.token(self.packing.order - 1).astype(np.int64)

    @cached_property
    def starts(self) -> np.ndarray:
        """The (contexts,) indices of the first n-gram of each context."""
        return np.flatnonzero(_new(self.packing.contexts(self.words)))

    @cached_property
    def totals(self) -> np.ndarray:
        """The (contexts,) int64 numbers of occurrences of the contexts."""
        return _sums(self.counts, self.starts)

    def take(self, index: np.ndarray) -> "NgramCounts":
        """Return the n-grams at (k,) indices, in their order."""
        return NgramCounts(self.packing, self.words[:, index], self.counts[index])

    def lower(self) -> tuple["NgramCounts", np.ndarray]:
        """Return the n-grams of the next lower order, and (n,) the index of each n-gram in them."""
        order = self.packing.order
        packing = Packing(order - 1, self.packing.vocabulary)
        indices = [*range(order - 2), order - 1]
        words = packing.pack([self.token(index) for index in indices])
        # The contexts are in ascending order already.
        groups = np.cumsum(_new(packing.contexts(words)))
        ascending = np.argsort(groups << 32 | self.successors)
        words = words[:, ascending]
        new = _new(words)
        index = np.empty(len(ascending), np.int64)
        index[ascending] = np.cumsum(new) - 1
        starts = np.flatnonzero(new)
        return NgramCounts(
            packing, words[:, starts], _sums(self.counts[ascending], starts)
        ), index


def count_ngrams(sequences: Iterable[np.ndarray], packing: Packing) -> NgramCounts:
    """Count the n-grams of the packing's order in sequences of ids, not across their ends."""
    before = np.full(packing.order - 1, packing.vocabulary, np.uint32)
    stream = np.concatenate(
        [before, *(part for tokens in sequences for part in (tokens, before))]
    ).astype(np.uint64)
    last = packing.order - 1
    words = packing.pack(
        [stream[last - back : len(stream) - back] for back in (*range(1, last + 1), 0)]
    )
    words = words[:, stream[last:] != packing.vocabulary]
    if len(words) == 1:
        words.sort()
    else:
        words = words[:, _ascending(words)]
    starts = np.flatnonzero(_new(words))
    return NgramCounts(
        packing, words[:, starts], np.diff(starts, append=words.shape[1])
    )


def merge(parts: Sequence[NgramCounts]) -> NgramCounts:
    """Merge n-grams of the same packing; equal n-grams are added up."""
    words = np.concatenate([part.words for part in parts], axis=1)
    ascending = _ascending(words)
    words = words[:, ascending]
    starts = np.flatnonzero(_new(words))
    counts = np.concatenate([part.counts for part in parts])[ascending]
    return NgramCounts(parts[0].packing, words[:, starts], _sums(counts, starts))


def _ascending(words: np.ndarray) -> np.ndarray:
    """Return the (n,) indices that sort (words, n) by rows; twice as fast as np.lexsort."""
    keys = words[0]
    for word in words[1:]:
        for half in (word >> np.uint64(32), word & np.uint64(2**32 - 1)):
            if half.any():
                ranks = np.unique(keys, return_inverse=True)[1].astype(np.uint64)
                keys = ranks << np.uint64(32) | half
    return np.argsort(keys)


def _new(words: np.ndarray) -> np.ndarray:
    """Return (n,) bool, True if a column of sorted words differs from the previous column."""
    differs = np.zeros(words.shape[1], bool)
    differs[:1] = True
    for word in words:
        differs[1:] |= word[1:] != word[:-1]
    return differs


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the sums of the values between consecutive starts."""
    return np.add.reduceat(values, starts) if len(starts) else values[:0]


@dataclass(frozen=True)
class Contexts:
    """Contexts of several orders with their likeliest successors, unsorted."""

    orders: np.ndarray  # (n,) uint8
    keys: np.ndarray  # (n,) uint64
    totals: np.ndarray  # (n,) int64: occurrences, with any successor
    gains: np.ndarray  # (n,) float32: gain in log-likelihood of the data, per byte
    lengths: np.ndarray  # (n,) uint8: number of successors
    ids: np.ndarray  # (m,) uint32: successors of the first context, then of the second
    counts: np.ndarray  # (m,) int64: counts of the successors

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        return vars(self)

    def take(self, index: np.ndarray) -> "Contexts":
        """Return the contexts at (k,) indices, in their order."""
        lengths = self.lengths[index].astype(np.int64)
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        entries = np.repeat(
            starts[index] - (np.cumsum(lengths) - lengths), lengths
        ) + np.arange(lengths.sum())
        chosen = {
            name: array[entries if name in ("ids", "counts") else index]
            for name, array in self.arrays().items()
        }
        return Contexts(**chosen)

    def sizes(self, vocabulary: int) -> np.ndarray:
        """Return the (n,) sizes of the contexts in the file, in bytes."""
        return 16 + self.lengths.astype(np.int64) * (4 + id_dtype(vocabulary).itemsize)

    def best(self, size: int, vocabulary: int) -> "Contexts":
        """Return the contexts with the best gain per byte that fit in `size` bytes, unsorted.

        Among equal gains, lower orders and then smaller keys come first.
        """
        sizes = self.sizes(vocabulary)
        if sizes.sum() <= size:
            return self
        falling = np.argsort(-self.gains)
        excluded = np.searchsorted(np.cumsum(sizes[falling]), size, side="right")
        bound = self.gains[falling[excluded]]
        better = np.flatnonzero(self.gains > bound)
        equal = np.flatnonzero(self.gains == bound)
        equal = equal[np.lexsort((self.keys[equal], self.orders[equal]))]
        fits = np.cumsum(sizes[equal]) <= size - sizes[better].sum()
        return self.take(np.concatenate([better, equal[fits]]))


def descend(ngrams: NgramCounts) -> list[tuple[NgramCounts, np.ndarray]]:
    """Return the n-grams of each order down to 2, with the (n,) indices of their backoff n-grams."""
    levels = []
    while ngrams.packing.order > 2:
        lower, index = ngrams.lower()
        levels.append((ngrams, index))
        ngrams = lower
    return [*levels, (ngrams, np.empty(0, np.int64))]


def score_levels(
    levels: Sequence[tuple[NgramCounts, np.ndarray]],
    bigrams: NgramCounts,
    probabilities: np.ndarray,
) -> Iterator[Contexts]:
    """Yield the contexts of order 3 and above that improve the prediction of their successors.

    The gain of a context is relative to the next lower order. Each item has one order, in ascending
    order. `levels` is the result of `descend`, `bigrams` all bigrams of the levels' latest tokens,
    and `probabilities` (n,) the bigrams' probabilities by `interpolate`.
    """
    index = np.searchsorted(bigrams.words[0], levels[-1][0].words[0])
    probabilities = probabilities[index]
    for ngrams, index in reversed(levels[:-1]):
        backoff = probabilities[index]
        probabilities = interpolate(ngrams, backoff)
        yield score_contexts(ngrams, probabilities, backoff)


def best_of(
    contexts: Contexts, others: Contexts, size: int, vocabulary: int
) -> Contexts:
    """Merge two sets of contexts; drop contexts that `best` can never choose for this size."""
    if contexts.sizes(vocabulary).sum() > size:
        others = others.take(np.flatnonzero(others.gains >= contexts.gains.min()))
    columns = zip(contexts.arrays().values(), others.arrays().values())
    both = Contexts(*map(np.concatenate, columns))
    # Keep one more: the first context that does not fit also excludes smaller, worse contexts.
    return both.best(size + LARGEST, vocabulary)


def interpolate(ngrams: NgramCounts, backoff: np.ndarray) -> np.ndarray:
    """Return the (n,) probabilities of the successors, p_o = (count + k p_{o-1}) / (total + k).

    `backoff` (n,) is p_{o-1} of each n-gram's successor.
    """
    totals = np.repeat(ngrams.totals, np.diff(ngrams.starts, append=len(ngrams.counts)))
    return (ngrams.counts + STRENGTH * backoff) / (totals + STRENGTH)


def score_contexts(
    ngrams: NgramCounts, probabilities: np.ndarray, backoff: np.ndarray
) -> Contexts:
    """Return the contexts with positive gain.

        gain = sum over successors of (count - 1) log(p_o / p_{o-1})

    `probabilities` and `backoff` are p_o and p_{o-1}, (n,). The count is reduced by one, since a
    single occurrence says little about other texts; so successors that occur once are dropped.
    """
    packing = ngrams.packing
    starts = ngrams.starts
    likely = np.flatnonzero(ngrams.counts > 1)
    context = np.searchsorted(starts, likely, side="right") - 1
    # Sort by context, then by descending count, then by id.
    order = np.lexsort((-ngrams.counts[likely], context))
    likely = likely[order]
    context = context[order]
    is_kept = np.ones(len(context), bool)
    is_kept[SUCCESSORS:] = context[SUCCESSORS:] != context[:-SUCCESSORS]
    likely = likely[is_kept]
    context = context[is_kept]
    first = np.flatnonzero(np.diff(context, prepend=-1))
    chosen = context[first]
    lengths = np.diff(first, append=len(context))
    heads = ngrams.take(starts[chosen])
    contexts = Contexts(
        orders=np.full(len(chosen), packing.order, np.uint8),
        keys=hash_contexts([heads.token(index) for index in range(packing.order - 1)]),
        totals=ngrams.totals[chosen],
        gains=np.zeros(len(chosen), np.float32),
        lengths=lengths.astype(np.uint8),
        ids=ngrams.take(likely).successors.astype(np.uint32),
        counts=ngrams.counts[likely],
    )
    ratios = np.log(probabilities[likely] / backoff[likely])
    gains = _sums((ngrams.counts[likely] - 1) * ratios, first)
    contexts.gains[:] = gains / contexts.sizes(packing.vocabulary)
    padded = heads.token(packing.order - 2) == packing.vocabulary
    return contexts.take(np.flatnonzero((gains > 0) & ~padded))


def no_contexts() -> Contexts:
    """Return a Contexts object without contexts."""
    dtypes = (np.uint8, np.uint64, np.int64, np.float32, np.uint8, np.uint32, np.int64)
    return Contexts(*(np.empty(0, dtype) for dtype in dtypes))


def id_dtype(vocabulary: int) -> np.dtype:
    """Return the dtype of the successors' ids in the file."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def table_size(packing: Packing) -> int:
    """Return the size of a table without contexts and header, in bytes."""
    return 4 * packing.vocabulary + 4 * (packing.order - 1)


def table_tensors(
    contexts: Contexts, unigrams: np.ndarray, order: int
) -> dict[str, np.ndarray]:
    """Return the tensors in the file's order: larger dtypes first, for alignment."""
    tensors = {"unigrams": _saturated(unigrams)}
    for level in range(2, order + 1):
        chosen = np.flatnonzero(contexts.orders == level)
        own = contexts.take(chosen[np.argsort(contexts.keys[chosen])])
        tensors[f"keys_{level}"] = own.keys.astype("<u8")
        tensors[f"totals_{level}"] = _saturated(own.totals)
        starts = np.cumsum(np.append(0, own.lengths), dtype="<u4")
        tensors[f"first_{level}"] = starts
        tensors[f"counts_{level}"] = _saturated(own.counts)
        tensors[f"ids_{level}"] = own.ids.astype(id_dtype(len(unigrams)))
    return dict(sorted(tensors.items(), key=lambda named: -named[1].itemsize))


def _saturated(counts: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.minimum(counts, 2**32 - 1).astype("<u4")
    return result


def write_table(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file with the SHA-256 of the tensors in its metadata.

    The safetensors library is not used, because it writes metadata in a random order, so every
    run would give different bytes.
    """
    digest = hashlib.sha256()
    offset = 0
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {}
    for name, tensor in tensors.items():
        digest.update(tensor.data)
        offsets = [offset, offset := offset + tensor.nbytes]
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    described = {"__metadata__": {**metadata, "sha256": digest.hexdigest()}, **header}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.data)


def find_table(folder: Path, *, vocabulary: int, tokenizer: Path) -> Path | None:
    """Return the path of the n-gram table in a folder, or None if there is no table.

    Raises UserError if the table is damaged, or was made for another vocabulary or tokenizer.
    """
    path = folder / TABLE
    if not path.exists():
        return None
    if not path.is_file():  # opening a FIFO would block forever
        raise _table_error(path, "an n-gram table", "a folder, FIFO or device")
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            metadata = dict(
                json.loads(file.read(min(size, HEADER_BYTES)))["__metadata__"]
            )
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _table_error(path, "an n-gram table", in_one_line(error)) from error
    expected = {
        "format": FORMAT,
        "vocabulary": str(vocabulary),
        "tokenizer": fingerprint_file(tokenizer),
    }
    for name, value in expected.items():
        if metadata.get(name) != value:
            raise _table_error(
                path, f"an n-gram table with {name} {value}", metadata.get(name)
            )
    if metadata.get("sha256") != digest:
        raise _table_error(path, "an intact n-gram table", "a checksum mismatch")
    return path


def _table_error(path: Path, expected: str, got: object) -> UserError:
    return UserError(
        f"{path} must be {expected}, got {got}. Copy it again, or remove it to work without it."
    )


def link_table(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy if a link is impossible."""
    target.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        partial = target.with_name(f".{target.name}.partial")
        shutil.copyfile(source, partial)
        os.replace(partial, target)
