r"""N-grams as a source of drafts: of the training data, from a table, and of the text so far.

What follows a context is interpolated from low to high order, first by the table's counts, then by the text's:

    p_o(c) = (count_o(c) + κ p_{o-1}(c)) / (n_o + κ),    p_1 = u, the unigrams

With D_o = D_{o-1} κ / (n_o + κ), the share that each order leaves to the orders below it, this is

    p(c) = D (u(c) + Σ_o count_o(c) / (κ D_{o-1}))

so only successors that were counted are looked at, whatever the size of the vocabulary. A context is known by
a 64-bit hash of its tokens, from the last one back; a collision costs a wrong draft and nothing else.

The table is `ngrams.safetensors` of a model directory, made by data_prep and read by memory map.
"""

import hashlib
import json
import mmap
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

FILE = "ngrams.safetensors"
FORMAT = "adaptive-tokens ngrams 1"
ABSENT = "%s is absent: drafts come from the adaptive tokens and the text alone"  # where an export had the file
MULTIPLIER = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
TEXT_CONTEXTS = (2, 3, 4, 6)  # tokens of the contexts that are counted in the text
LONGEST = 7  # tokens of any context: the table has at most 8-grams
RECENT = 8  # successors of a context of the text that are remembered: the latest
CACHED = 1 << 16  # contexts whose successors by the table are kept as Python objects
ARRAYS = ("keys", "totals", "first", "ids", "counts")  # of an order
TYPES: dict[str, Literal["H", "I", "Q"]] = {
    "U16": "H",
    "U32": "I",
    "U64": "Q",
}  # of safetensors, of memoryview

Integers: TypeAlias = "memoryview[int]"
Shares = dict[int, float]  # p(c) / D by successor c


@dataclass(frozen=True)
class NgramWeights:
    """The strength of the n-grams, fitted on held-out text by train.export.

    `places[j]` is λ of place j behind the root, and the last one of all places behind it.
    """

    table: float = 2.0  # κ of the table's counts
    text: float = 1.0  # κ of the text's
    places: tuple[float, ...] = (0.4,)

    def __post_init__(self) -> None:
        """Raise ValueError for weights that no fit gives."""
        if not (0 < self.table <= 1000 and 0 < self.text <= 1000):
            raise ValueError(
                f"κ must be above 0 and at most 1000, got {self.table} and {self.text}"
            )
        if not self.places or not all(0 <= weight <= 4 for weight in self.places):
            raise ValueError(
                f"places must be weights from 0 to 4, got {list(self.places)}"
            )

    @classmethod
    def from_json(cls, value: Any) -> "NgramWeights":
        """Return the weights of adaptive.json's `ngrams`, with `table` null for none. Raises ValueError."""
        try:
            numbers = [value["text"], *value["places"]]
            numbers += [] if value["table"] is None else [value["table"]]
        except (KeyError, TypeError):
            numbers = [None]
        if any(type(number) not in (int, float) for number in numbers):
            raise ValueError(
                f"ngrams must be numbers table and text and a list places, got {value!r:.60}"
            )
        table = cls.table if value["table"] is None else value["table"]
        return cls(table, value["text"], tuple(value["places"]))

    def place(self, j: int) -> float:
        """Return λ_j."""
        return self.places[min(j, len(self.places) - 1)]


class NgramTable:
    """Counts over the training data, read where they lie. Raises ValueError, as the end of a sentence."""

    def __init__(self, path: Path) -> None:
        if not path.stat().st_size:
            raise ValueError("is no table of n-grams")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arrays, self.order, self.vocabulary = _parse(memoryview(data))
        counts = arrays["unigrams"]
        scale = 1 / (sum(counts) + self.vocabulary)
        self.unigrams = [
            (count + 1) * scale for count in counts
        ]  # smoothed: above 0 for every id
        self._orders = [
            tuple(arrays[f"{name}_{o}"] for name in ARRAYS)
            for o in range(2, self.order + 1)
        ]
        self._known: dict[tuple[int, float], tuple[Shares, float]] = {}

    def successors(self, keys: Sequence[int], κ: float) -> tuple[Shares, float]:
        """Return p(c) / D of every successor by the table, and D; `keys` are the `context_keys`.

        What is returned is kept for the next time: it must not be changed.
        """
        keys = keys[: self.order - 1]
        if not keys:
            return {}, 1.0
        known = self._known.get((keys[-1], κ))
        if known is None:
            if len(self._known) >= CACHED:
                self._known.clear()
            known = self._known[keys[-1], κ] = self._interpolated(keys, κ)
        return known

    def _interpolated(self, keys: Sequence[int], κ: float) -> tuple[Shares, float]:
        shares = Shares()
        D = 1.0
        unigrams = self.unigrams
        for key, (contexts, totals, first, ids, counts) in zip(keys, self._orders):
            at = bisect_left(contexts, key)
            if at == len(contexts) or contexts[at] != key:
                continue
            scale = 1 / (κ * D)
            for i in range(first[at], first[at + 1]):
                token = ids[i]
                shares[token] = shares.get(token, unigrams[token]) + counts[i] * scale
            D *= κ / (totals[at] + κ)
        return shares, D


def open_table(path: Path, rows: int | None) -> NgramTable:
    """Return the table of a model of `rows` ids, if known. Raises ValueError, in a sentence."""
    try:
        table = NgramTable(path)
    except ValueError as error:
        raise ValueError(
            f"{path} {error}. Copy it again from the export, or delete it."
        ) from error
    if rows is not None and (known := table.vocabulary) > rows:
        raise ValueError(
            f"{path} must be of at most the model's {rows} ids, got {known}. Delete it."
        )
    return table


def _parse(data: Integers) -> tuple[dict[str, Integers], int, int]:
    """Return the arrays, the order and the vocabulary of a safetensors file, which are checked."""
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(bytes(data[8:begin]))
        metadata: dict[str, str] = header.pop("__metadata__")
        kind = metadata["format"]
        digest = metadata["sha256"]
        order = int(metadata["order"])
        vocabulary = int(metadata["vocabulary"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("is no table of n-grams") from error
    if kind != FORMAT:
        raise ValueError(f"must have the format {FORMAT!r}, got {kind!r:.60}")
    if hashlib.sha256(data[begin:]).hexdigest() != digest:
        raise ValueError("is damaged: its checksum does not match")
    arrays: dict[str, Integers] = {}
    try:
        for name, tensor in header.items():
            first, last = tensor["data_offsets"]
            arrays[name] = data[begin + first : begin + last].cast(
                TYPES[tensor["dtype"]]
            )
        fits = len(arrays["unigrams"]) == vocabulary and all(
            _fits([arrays[f"{name}_{o}"] for name in ARRAYS], vocabulary)
            for o in range(2, order + 1)
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError("is damaged: its header does not match its arrays") from error
    if not fits:
        raise ValueError("is damaged: its arrays contradict each other")
    return arrays, order, vocabulary


def _fits(arrays: Sequence[Integers], vocabulary: int) -> bool:
    """Return whether every context has a total and successors, which are ids of the vocabulary."""
    keys, totals, first, ids, counts = arrays
    starts = np.asarray(first)
    return bool(
        len(keys) == len(totals) == len(first) - 1
        and (starts[0], starts[-1]) == (0, len(ids))
        and (starts[1:] >= starts[:-1]).all()
        and len(ids) == len(counts)
        and (not len(ids) or np.asarray(ids).max() < vocabulary)
    )


class Ngrams:
    """What n-grams may draft a model's texts from; without a table all ids of the `vocabulary` are alike."""

    def __init__(
        self,
        table: NgramTable | None,
        vocabulary: int,
        *,
        text: bool = True,
        weights: NgramWeights = NgramWeights(),
    ) -> None:
        self.table = table
        self.text = text
        self.weights = weights
        known = table.unigrams if table else []
        rest = min(known) if known else 1 / vocabulary
        self.unigrams = [*known, *[rest] * (vocabulary - len(known))]


class TextNgrams:
    """The n-grams of one text, counted as it grows, over those of the table."""

    def __init__(self, ngrams: Ngrams) -> None:
        self.weights = ngrams.weights
        self.unigrams = ngrams.unigrams
        self._ngrams = ngrams
        self._read = 0  # tokens that are counted as successors
        self._after: dict[
            int, dict[int, int]
        ] = {}  # by a context's hash: latest successors and their counts

    def extend(self, text: Sequence[int]) -> None:
        """Count the tokens that the text has more than before."""
        if not self._ngrams.text:
            return
        for end in range(max(1, self._read), len(text)):
            token = text[end]
            keys = context_keys(text[max(0, end - LONGEST) : end])
            for length in TEXT_CONTEXTS:
                if length > len(keys):
                    break
                successors = self._after.setdefault(keys[length - 1], {})
                successors[token] = successors.pop(token, 0) + 1  # now the latest one
                if len(successors) > RECENT:
                    del successors[next(iter(successors))]
        self._read = len(text)

    def successors(
        self, tail: Sequence[int]
    ) -> tuple[Shares, float, list[dict[int, int]]]:
        """Return p(c) / D of every successor of a text's last tokens, D, and the text's own counts of them."""
        keys = context_keys(tail)
        table = self._ngrams.table
        shares, D = (
            table.successors(keys, self.weights.table) if table else (Shares(), 1.0)
        )
        κ = self.weights.text
        unigrams = self.unigrams
        counted: list[dict[int, int]] = []
        for length in TEXT_CONTEXTS:
            if length > len(keys):
                break
            counts = self._after.get(keys[length - 1])
            if counts is None:  # nor a longer context, which ends with this one
                break
            if not counted:
                shares = shares.copy()
            scale = 1 / (κ * D)
            for token, count in counts.items():
                shares[token] = shares.get(token, unigrams[token]) + count * scale
            D *= κ / (sum(counts.values()) + κ)
            counted.append(counts)
        return shares, D, counted


def context_keys(tail: Sequence[int]) -> list[int]:
    """Return the hashes of the last 1, 2, ... up to LONGEST tokens of a text."""
    keys: list[int] = []
    key = 0
    for token in tail[: -LONGEST - 1 : -1]:
        key = (key + token + 1) * MULTIPLIER & MASK
        keys.append(key)
    return keys
