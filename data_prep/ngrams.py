"""Count n-grams of the training data, select them by gain, write the decoders' table.

An n-gram of order o is a context of o - 1 tokens and a successor. In memory it is packed
into 64-bit words, latest token first, so that in ascending order all contexts that share
their latest tokens are neighbours:

    latest, the one before, ..., oldest, successor     `bits` bits each, none is divided

A sequence begins with n-grams whose contexts are padded with the id V. So the counts of
the highest order contain those of all lower ones: without their oldest tokens, n-grams are
those of the next lower order.

The file is safetensors. Its metadata has `format`, `order`, `vocabulary` (V), `tokens`
(counted), `tokenizer` (SHA-256 of tokenizer.json) and `sha256` (of the tensors' bytes, in
the order of the file). Its tensors:

    unigrams         (V,) uint32        counts of the ids
    and for each order o from 2 on, with n_o contexts that have m_o successors:
    keys_o           (n_o,) uint64      `hash_contexts` of the contexts, ascending
    totals_o         (n_o,) uint32      occurrences of the context, with any successor
    first_o          (n_o + 1,) uint32  context i has successors first_o[i]:first_o[i + 1]
    ids_o            (m_o,) uint16      successors, the likeliest first; uint32: V > 65536
    counts_o         (m_o,) uint32      their counts

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

from conf import UserError
from conf.errors import in_one_line
from conf.fingerprint import fingerprint_file

TABLE = "ngrams.safetensors"
FORMAT = "adaptive-tokens ngrams 1"
MULTIPLIER = 0x9E3779B97F4A7C15
HEADER_BYTES = 2**20  # of the file's JSON, at most
SUCCESSORS = 8  # of a context, at most
LARGEST = 16 + 8 * SUCCESSORS  # bytes of a context in the file, at most
STRENGTH = 2.0  # of the backoff: the weight k of p_{o-1} in p_o
DTYPES = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "U64": np.dtype("<u8")}


def hash_contexts(tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Return the (n,) uint64 keys of contexts from their tokens, latest first, (n,) each.

    h = 0; for each token t: h = ((h + t + 1) * MULTIPLIER) mod 2**64. The key of a
    shorter context is an intermediate value of a longer one's.
    """
    keys = np.zeros(len(tokens[0]), np.uint64)
    for column in tokens:
        keys = (keys + column.astype(np.uint64) + np.uint64(1)) * np.uint64(MULTIPLIER)
    return keys


@dataclass(frozen=True)
class Packing:
    """The layout of an n-gram's tokens in its words; the last word may hold fewer."""

    order: int
    vocabulary: int  # the id V, padding, must fit too

    @property
    def bits(self) -> int:
        """Bits of a token."""
        return self.vocabulary.bit_length()

    @property
    def words(self) -> int:
        """Words of an n-gram."""
        return -(-self.order // (64 // self.bits))

    def pack(self, tokens: Sequence[np.ndarray]) -> np.ndarray:
        """Return (words, n) uint64 of n-grams from their tokens, latest to successor."""
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
        last = min(self.order, (index // per + 1) * per) - 1  # of the same word
        shift = np.uint64((last - index) * self.bits)
        result: np.ndarray = words[index // per] >> shift & np.uint64(2**self.bits - 1)
        return result

    def contexts(self, words: np.ndarray) -> np.ndarray:
        """Return the words without the successors."""
        return np.concatenate([words[:-1], words[-1:] >> np.uint64(self.bits)])

    def bound(self, latest: int, before: int = 0) -> int:
        """Return the least first word of n-grams whose contexts end in these two tokens."""
        rest = min(self.order, 64 // self.bits) - 2
        return ((latest << self.bits) + before) << rest * self.bits


@dataclass(frozen=True)
class NgramCounts:
    """Distinct n-grams of one order in ascending order."""

    packing: Packing
    words: np.ndarray  # (words, n) uint64
    counts: np.ndarray  # (n,) int64

    def token(self, index: int) -> np.ndarray:
        """Return the (n,) tokens at a place of the packing."""
        return self.packing.token(self.words, index)

    @property
    def successors(self) -> np.ndarray:
        """(n,) int64 ids."""
        return self.token(self.packing.order - 1).astype(np.int64)

    @cached_property
    def starts(self) -> np.ndarray:
        """(contexts,) the first n-gram of each context."""
        return np.flatnonzero(_new(self.packing.contexts(self.words)))

    @cached_property
    def totals(self) -> np.ndarray:
        """(contexts,) int64 how often each context occurred."""
        return _sums(self.counts, self.starts)

    def take(self, index: np.ndarray) -> "NgramCounts":
        """Return the n-grams at (k,) indices, in their order."""
        return NgramCounts(self.packing, self.words[:, index], self.counts[index])

    def lower(self) -> tuple["NgramCounts", np.ndarray]:
        """Return the n-grams of the next lower order, and (n,) each one's index in them."""
        order = self.packing.order
        packing = Packing(order - 1, self.packing.vocabulary)
        places = [*range(order - 2), order - 1]
        words = packing.pack([self.token(place) for place in places])
        # They are in the order of their contexts already.
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
    """Count n-grams of the packing's order in sequences of ids, not across their ends."""
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
    """Return the n-grams of all parts, each of which is in ascending order."""
    words = np.concatenate([part.words for part in parts], axis=1)
    ascending = _ascending(words)
    words = words[:, ascending]
    starts = np.flatnonzero(_new(words))
    counts = np.concatenate([part.counts for part in parts])[ascending]
    return NgramCounts(parts[0].packing, words[:, starts], _sums(counts, starts))


def _ascending(words: np.ndarray) -> np.ndarray:
    """Return the indices that sort (words, n) by rows; twice as fast as np.lexsort."""
    keys = words[0]
    for word in words[1:]:
        for half in (word >> np.uint64(32), word & np.uint64(2**32 - 1)):
            if half.any():
                ranks = np.unique(keys, return_inverse=True)[1].astype(np.uint64)
                keys = ranks << np.uint64(32) | half
    return np.argsort(keys)


def _new(words: np.ndarray) -> np.ndarray:
    """Return (n,) bool: True where a column of sorted words differs from the last."""
    differs = np.zeros(words.shape[1], bool)
    differs[:1] = True
    for word in words:
        differs[1:] |= word[1:] != word[:-1]
    return differs


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the sums of the values from each start to the next."""
    return np.add.reduceat(values, starts) if len(starts) else values[:0]


@dataclass(frozen=True)
class Contexts:
    """Contexts of several orders with their likeliest successors, in any order."""

    orders: np.ndarray  # (n,) uint8
    keys: np.ndarray  # (n,) uint64
    totals: np.ndarray  # (n,) int64: occurrences, with any successor
    gains: np.ndarray  # (n,) float32: log-likelihood of the data that a byte of it adds
    lengths: np.ndarray  # (n,) uint8: successors
    ids: np.ndarray  # (m,) uint32: successors of the first context, then of the second
    counts: np.ndarray  # (m,) int64

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        return vars(self)

    def take(self, index: np.ndarray) -> "Contexts":
        """Return the contexts at (k,) indices, in their order."""
        lengths = self.lengths[index].astype(np.int64)
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        places = np.repeat(
            starts[index] - (np.cumsum(lengths) - lengths), lengths
        ) + np.arange(lengths.sum())
        chosen = {
            name: array[places if name in ("ids", "counts") else index]
            for name, array in self.arrays().items()
        }
        return Contexts(**chosen)

    def sizes(self, vocabulary: int) -> np.ndarray:
        """Return the (n,) bytes of the contexts in the file."""
        return 16 + self.lengths.astype(np.int64) * (4 + id_dtype(vocabulary).itemsize)

    def best(self, size: int, vocabulary: int) -> "Contexts":
        """Return the contexts with the best gain per byte that fit in `size` bytes.

        Equal gains are ordered by order and key. The result is in no order.
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
    """Return the n-grams of each order down to 2, with (n,) indices of their backoffs."""
    levels = []
    while ngrams.packing.order > 2:
        lower, index = ngrams.lower()
        levels.append((ngrams, index))
        ngrams = lower
    return [*levels, (ngrams, np.empty(0, np.int64))]


def score_levels(
    levels: Sequence[tuple[NgramCounts, np.ndarray]],
    bigrams: NgramCounts,
    chances: np.ndarray,
) -> Iterator[Contexts]:
    """Yield the contexts of order 3 and above that gain, order by order.

    `levels` come from `descend`; `bigrams` are all of the levels' latest tokens, and
    `chances` (n,) their probabilities by `interpolate`.
    """
    chances = chances[np.searchsorted(bigrams.words[0], levels[-1][0].words[0])]
    for ngrams, index in reversed(levels[:-1]):
        backoff = chances[index]
        chances = interpolate(ngrams, backoff)
        yield score_contexts(ngrams, chances, backoff)


def best_of(
    contexts: Contexts, others: Contexts, size: int, vocabulary: int
) -> Contexts:
    """Merge contexts, without those that `best` can never choose for this size."""
    if contexts.sizes(vocabulary).sum() > size:
        others = others.take(np.flatnonzero(others.gains >= contexts.gains.min()))
    columns = zip(contexts.arrays().values(), others.arrays().values())
    both = Contexts(*map(np.concatenate, columns))
    # The first context that does not fit excludes smaller, worse ones.
    return both.best(size + LARGEST, vocabulary)


def interpolate(ngrams: NgramCounts, backoff: np.ndarray) -> np.ndarray:
    """Return (n,) successors' probabilities p_o = (count + k p_{o-1}) / (total + k).

    `backoff` is p_{o-1} of each n-gram's successor, (n,).
    """
    totals = np.repeat(ngrams.totals, np.diff(ngrams.starts, append=len(ngrams.counts)))
    return (ngrams.counts + STRENGTH * backoff) / (totals + STRENGTH)


def score_contexts(
    ngrams: NgramCounts, chances: np.ndarray, backoff: np.ndarray
) -> Contexts:
    """Return the contexts whose gain is positive.

        gain = sum over successors of (count - 1) log(p_o / p_{o-1})

    One occurrence is left out: a successor that was seen once says little about other
    texts, and is left out too. `chances` and `backoff` are p_o and p_{o-1}, (n,).
    """
    packing = ngrams.packing
    starts = ngrams.starts
    likely = np.flatnonzero(ngrams.counts > 1)
    context = np.searchsorted(starts, likely, side="right") - 1
    # By context, then by count, the largest first; equal counts by id.
    order = np.lexsort((-ngrams.counts[likely], context))
    likely = likely[order]
    context = context[order]
    kept = np.ones(len(context), bool)
    kept[SUCCESSORS:] = context[SUCCESSORS:] != context[:-SUCCESSORS]
    likely = likely[kept]
    context = context[kept]
    first = np.flatnonzero(np.diff(context, prepend=-1))
    chosen = context[first]
    lengths = np.diff(first, append=len(context))
    heads = ngrams.take(starts[chosen])
    contexts = Contexts(
        orders=np.full(len(chosen), packing.order, np.uint8),
        keys=hash_contexts([heads.token(place) for place in range(packing.order - 1)]),
        totals=ngrams.totals[chosen],
        gains=np.zeros(len(chosen), np.float32),
        lengths=lengths.astype(np.uint8),
        ids=ngrams.take(likely).successors.astype(np.uint32),
        counts=ngrams.counts[likely],
    )
    gains = _sums(
        (ngrams.counts[likely] - 1) * np.log(chances[likely] / backoff[likely]), first
    )
    contexts.gains[:] = gains / contexts.sizes(packing.vocabulary)
    padded = heads.token(packing.order - 2) == packing.vocabulary
    return contexts.take(np.flatnonzero((gains > 0) & ~padded))


def no_contexts() -> Contexts:
    """Return Contexts of length 0."""
    kinds = (np.uint8, np.uint64, np.int64, np.float32, np.uint8, np.uint32, np.int64)
    return Contexts(*(np.empty(0, kind) for kind in kinds))


def id_dtype(vocabulary: int) -> np.dtype:
    """Return the type of the successors' ids in the file."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def table_size(packing: Packing) -> int:
    """Return the bytes of a table without contexts, less the header."""
    return 4 * packing.vocabulary + 4 * (packing.order - 1)


def table_tensors(
    contexts: Contexts, unigrams: np.ndarray, order: int
) -> dict[str, np.ndarray]:
    """Return the file's tensors in its order: the widest first, for alignment."""
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
    """Write safetensors with the tensors' SHA-256 in the metadata.

    The library writes metadata in an order of its own: other bytes on every run.
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
    """Return the path of the table in a folder, None without a table.

    Raises UserError for a damaged table, and for one of another vocabulary or tokenizer.
    """
    path = folder / TABLE
    if not path.exists():
        return None
    if not path.is_file():  # opening a FIFO would wait for ever
        raise _refused(path, "an n-gram table", "no regular file")
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            metadata = dict(
                json.loads(file.read(min(size, HEADER_BYTES)))["__metadata__"]
            )
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(path, "an n-gram table", in_one_line(error)) from error
    expected = {
        "format": FORMAT,
        "vocabulary": str(vocabulary),
        "tokenizer": fingerprint_file(tokenizer),
    }
    for name, value in expected.items():
        if metadata.get(name) != value:
            raise _refused(
                path, f"an n-gram table of {name} {value}", metadata.get(name)
            )
    if metadata.get("sha256") != digest:
        raise _refused(path, "a whole n-gram table", "a checksum mismatch")
    return path


def _refused(path: Path, expected: str, got: object) -> UserError:
    return UserError(
        f"{path} must be {expected}, got {got}. Copy it anew, or remove it to do without."
    )


def link_table(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where that is impossible."""
    target.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        partial = target.with_name(f".{target.name}.partial")
        shutil.copyfile(source, partial)
        os.replace(partial, target)
