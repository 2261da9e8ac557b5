r"""N-grams as a source of drafts: of the training data, from a table, and of the text so far.

What follows a context is interpolated from low to high order, first by the table's counts, then by the text's:

    p_o(c) = (count_o(c) + κ p_{o-1}(c)) / (n_o + κ),    p_1 = u, the unigrams

As a multiple of what an unseen candidate gets, a candidate c gets s(c):

    p(c) = u(c) D s(c),    D_o = D_{o-1} κ / (n_o + κ),    s(c) = 1 + Σ_o count_o(c) / (u(c) κ D_{o-1})

so only successors that were counted are looked at, whatever the size of the vocabulary. A context is known by
a 64-bit hash of its tokens, from the last one back; a collision costs a wrong draft and nothing else.

The table is `ngrams.safetensors` of a model directory, made by data_prep and read by memory map.
"""

import hashlib
import json
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILE, FORMAT = "ngrams.safetensors", "adaptive-tokens ngrams 1"
MULTIPLIER, MASK = 0x9E3779B97F4A7C15, 2**64 - 1
TEXT_CONTEXTS = (1, 2, 3, 5)  # tokens of the contexts that are counted in the text
LONGEST = 7  # tokens of any context
RECENT = 8  # successors of a context of the text that are remembered: the latest
CACHED = 1 << 16  # contexts of the table that are kept as Python objects
TYPES: dict[str, Literal["H", "I", "Q"]] = {"U16": "H", "U32": "I", "U64": "Q"}  # of safetensors, of memoryview

Pairs = tuple[tuple[int, float], ...]
Entry = tuple[float, Pairs]  # n_o, and (c, count_o(c) / u(c)) of each successor


@dataclass(frozen=True)
class NgramWeights:
    """The strength of the n-grams, fitted on held-out text by train.export.

    `places[j]` is λ of place j behind the root, and the last one of all places behind it.
    """

    table: float = 2.0  # κ of the table's counts
    text: float = 1.0  # κ of the text's
    places: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        """Raise ValueError for weights that no fit gives."""
        if not (self.table > 0 and self.text > 0):
            raise ValueError(f"κ must be above 0, got {self.table} and {self.text}")
        if not self.places or not all(0 <= weight <= 4 for weight in self.places):
            raise ValueError(f"places must be weights from 0 to 4, got {list(self.places)}")

    def place(self, j: int) -> float:
        """Return λ_j."""
        return self.places[min(j, len(self.places) - 1)]


class NgramTable:
    """Counts over the training data, read where they lie: `order` of the longest, `vocabulary` of ids.

    Raises ValueError, as the end of a sentence, for a file that is damaged or of another format.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arrays, metadata = _parse(memoryview(data))
        self.order, self.vocabulary = int(metadata["order"]), int(metadata["vocabulary"])
        self._unigrams = arrays["unigrams"]
        self._scale = 1.0 / (sum(self._unigrams) + self.vocabulary)
        names = ("keys", "totals", "first", "ids", "counts")
        self._orders = [tuple(arrays[f"{name}_{o}"] for name in names) for o in range(2, self.order + 1)]
        self._entries: dict[int, Entry | None] = {}

    def unigram(self, token: int) -> float:
        """Return u(c), smoothed by one: above 0 for every id, also for those behind the vocabulary."""
        count = self._unigrams[token] if token < self.vocabulary else 0
        return (count + 1) * self._scale

    def entry(self, length: int, key: int) -> Entry | None:
        """Return what follows a context of `length` tokens; None for one that the table does not have."""
        entries = self._entries
        if key not in entries:
            if len(entries) >= CACHED:
                entries.clear()
            entries[key] = self._read(length, key)
        return entries[key]

    def _read(self, length: int, key: int) -> Entry | None:
        keys, totals, first, ids, counts = self._orders[length - 1]
        at = bisect_left(keys, key)
        if at == len(keys) or keys[at] != key:
            return None
        successors = range(first[at], first[at + 1])
        return float(totals[at]), tuple((ids[i], counts[i] / self.unigram(ids[i])) for i in successors)


def _parse(data: memoryview[int]) -> tuple[dict[str, memoryview[int]], dict[str, str]]:
    """Return the arrays and the metadata of a safetensors file, whose checksum is looked at."""
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(bytes(data[8:begin]))
        metadata: dict[str, str] = header.pop("__metadata__")
        kind, digest = metadata["format"], metadata["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("is no table of n-grams") from error
    if kind != FORMAT:
        raise ValueError(f"must have the format {FORMAT!r}, got {kind!r:.60}")
    if hashlib.sha256(data[begin:]).hexdigest() != digest:
        raise ValueError("is damaged: its checksum does not match")
    arrays = dict[str, memoryview[int]]()
    for name, tensor in header.items():
        first, last = tensor["data_offsets"]
        arrays[name] = data[begin + first : begin + last].cast(TYPES[tensor["dtype"]])
    return arrays, metadata


@dataclass(frozen=True)
class Ngrams:
    """What n-grams of a model's texts may draft from; without a table its `vocabulary` ids are alike."""

    table: NgramTable | None
    text: bool
    weights: NgramWeights
    vocabulary: int


class TextNgrams:
    """The n-grams of one text, counted as it grows, and those of the table."""

    def __init__(self, ngrams: Ngrams) -> None:
        self.weights = ngrams.weights
        self._table, self._counts_text = ngrams.table, ngrams.text
        self._uniform = 1 / ngrams.vocabulary
        self._read = 0  # tokens that are counted as successors
        self._after: dict[int, dict[int, int]] = {}  # by a context's hash: latest successors and their counts

    def extend(self, text: Sequence[int]) -> None:
        """Count the tokens that the text has more than before."""
        if not self._counts_text:
            return
        for end in range(max(1, self._read), len(text)):
            token, keys = text[end], context_keys(text[max(0, end - TEXT_CONTEXTS[-1]) : end])
            for length in TEXT_CONTEXTS[: bisect_right(TEXT_CONTEXTS, len(keys))]:
                successors = self._after.setdefault(keys[length - 1], {})
                successors[token] = successors.pop(token, 0) + 1  # now the latest one
                if len(successors) > RECENT:
                    del successors[next(iter(successors))]
        self._read = len(text)

    def unigram(self, token: int) -> float:
        """Return u(c)."""
        return self._table.unigram(token) if self._table else self._uniform

    def ratios(self, tail: Sequence[int]) -> tuple[dict[int, float], float, list[dict[int, int]]]:
        """Return s(c) - 1 of every counted successor of a text's last tokens, D, and the text's own counts
        among them.
        """
        keys = context_keys(tail)
        ratios, share, counted = dict[int, float](), 1.0, list[dict[int, int]]()
        if self._table is not None:
            κ = self.weights.table
            for length, key in enumerate(keys[: self._table.order - 1], 1):
                if entry := self._table.entry(length, key):
                    total, pairs = entry
                    scale = 1 / (κ * share)
                    for token, ratio in pairs:
                        ratios[token] = ratios.get(token, 0.0) + ratio * scale
                    share *= κ / (total + κ)
        κ = self.weights.text
        for length in TEXT_CONTEXTS[: bisect_right(TEXT_CONTEXTS, len(keys))] if self._after else ():
            if counts := self._after.get(keys[length - 1]):
                scale = 1 / (κ * share)
                for token, count in counts.items():
                    ratios[token] = ratios.get(token, 0.0) + count * scale / self.unigram(token)
                share *= κ / (sum(counts.values()) + κ)
                counted.append(counts)
        return ratios, share, counted


def context_keys(tail: Sequence[int], longest: int = LONGEST) -> list[int]:
    """Return the hashes of the last 1, 2, ... up to `longest` tokens of a text."""
    keys, key = list[int](), 0
    for token in reversed(tail[-longest:]):
        key = (key + token + 1) * MULTIPLIER & MASK
        keys.append(key)
    return keys
