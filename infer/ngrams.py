r"""N-grams as a source of drafts: a table of the training data, and the text so far.

The distribution of the next token c is interpolated from low to high order, first with the
table's counts, then with the text's counts:

    p_o(c) = (count_o(c) + κ p_{o-1}(c)) / (n_o + κ),    p_1 = u, the unigrams

Let D_o = D_{o-1} κ / (n_o + κ) be the share of the lower orders after order o. Then

    p(c) = D (u(c) + Σ_o count_o(c) / (κ D_{o-1}))

So only successors with a count are read, whatever the size of the vocabulary. The key of a
context is a 64-bit hash of its tokens, beginning with the last one. A collision only causes
a wrong draft.

The table is `ngrams.safetensors` of a model directory, made by data_prep and read by
memory map.
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
#: A warning for an export that lost the file; its argument is the path.
ABSENT = "%s is absent: drafts come from the adaptive tokens and the text alone"
MULTIPLIER = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
TEXT_CONTEXTS = (2, 3, 4, 6)  # lengths in tokens of the contexts counted in the text
LONGEST = 7  # the longest context in tokens: the table has at most 8-grams
RECENT = 8  # the number of latest successors stored for a context of the text
CACHED = 1 << 16  # the number of contexts with cached successors from the table
ARRAYS = ("keys", "totals", "first", "ids", "counts")  # the arrays of each order
#: The type code of memoryview for each dtype of safetensors.
TYPES: dict[str, Literal["H", "I", "Q"]] = {"U16": "H", "U32": "I", "U64": "Q"}

Integers: TypeAlias = "memoryview[int]"
Shares = dict[int, float]  # p(c) / D for each successor c


@dataclass(frozen=True)
class NgramWeights:
    """The weights of the n-grams, read from adaptive.json.

    `places[j]` is the weight of the n-grams at place j after the root, when they are combined
    with adaptive tokens in greedy text. The last weight also applies to all later places.
    """

    table: float = 2.0  # κ of the table's counts
    text: float = 1.0  # κ of the text's counts
    places: tuple[float, ...] = (0.4, 0.5)

    def __post_init__(self) -> None:
        """Raise ValueError for weights out of range."""
        if (
            not self.places
            or not all(0 <= share <= 1 for share in self.places)
            or not (0 < self.table <= 1000 and 0 < self.text <= 1000)
        ):
            raise ValueError(
                "ngrams must have table and text above 0 and at most 1000, and places "
                f"from 0 to 1, got {self}"
            )

    @classmethod
    def from_json(cls, value: Any) -> "NgramWeights":
        """Return the weights from `ngrams` of adaptive.json.

        `table` may be null for a model without a table. Raises ValueError for other content.
        """
        try:
            table = cls.table if value["table"] is None else value["table"]
            return cls(table, value["text"], tuple(value["places"]))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"ngrams must be numbers table and text and a list places, got {value}"
            ) from error

    def place(self, j: int) -> float:
        """Return λ_j, the weight of n-grams for the token at place j of a draft."""
        return self.places[min(j, len(self.places) - 1)]


class NgramTable:
    """The n-gram counts of the training data, read by memory map."""

    def __init__(self, path: Path, rows: int | None = None) -> None:
        """Open the table of a model with `rows` ids; None if the number is unknown.

        Raises ValueError for a damaged file, another format, and a table of more ids.
        """
        arrays = _read(path)
        counts = arrays["unigrams"]
        self.vocabulary = len(counts)
        self.order = len(arrays) // len(ARRAYS) + 1
        if rows is not None and self.vocabulary > rows:
            raise ValueError(
                f"{path} must have at most the model's {rows} ids, got "
                f"{self.vocabulary}. Delete it."
            )
        # Smoothed, so that every id has a probability above 0.
        scale = 1 / (sum(counts) + self.vocabulary)
        self.unigrams = [(count + 1) * scale for count in counts]
        self._orders = [
            tuple(arrays[f"{name}_{o}"] for name in ARRAYS)
            for o in range(2, self.order + 1)
        ]
        self._cache: dict[tuple[int, float], tuple[Shares, float]] = {}

    def successors(self, keys: Sequence[int], κ: float) -> tuple[Shares, float]:
        """Return p(c) / D of every successor in the table, and D.

        `keys` are from `context_keys`. The result is cached, so do not change it.
        """
        keys = keys[: self.order - 1]
        if not keys:
            return {}, 1.0
        result = self._cache.get((keys[-1], κ))
        if result is None:
            if len(self._cache) >= CACHED:
                self._cache.clear()
            result = self._interpolated(keys, κ)
            self._cache[keys[-1], κ] = result
        return result

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


def _read(path: Path) -> dict[str, Integers]:
    """Return the arrays of a safetensors file with the right format and checksum."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = memoryview(mapped)
        begin = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(bytes(data[8:begin]))
        metadata = header.pop("__metadata__")
        digest = hashlib.sha256(data[begin:]).hexdigest()
        intact = metadata["format"] == FORMAT and metadata["sha256"] == digest
        arrays: dict[str, Integers] = {}
        for name, tensor in header.items():
            first, last = tensor["data_offsets"]
            kind = TYPES[tensor["dtype"]]
            arrays[name] = data[begin + first : begin + last].cast(kind)
        _check(arrays)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError(
            f"{path} must be an n-gram table of the format {FORMAT!r}, got a damaged file or "
            "another format. Copy it again from the export, or delete it."
        )
    return arrays


def _check(arrays: dict[str, Integers]) -> None:
    """Raise ValueError or KeyError if an index in the arrays is out of range.

    The check takes less time than the checksum.
    """
    vocabulary = len(arrays["unigrams"])
    orders = range(2, len(arrays) // len(ARRAYS) + 2)
    if not vocabulary or len(arrays) != 1 + len(ARRAYS) * len(orders):
        raise ValueError("unexpected arrays")
    for o in orders:
        keys, totals, first, ids, counts = (
            np.asarray(arrays[f"{name}_{o}"]) for name in ARRAYS
        )
        if (
            not len(keys) == len(totals) == len(first) - 1
            or not len(ids) == len(counts) == first[-1]
            or first[0]
            or (first[1:] < first[:-1]).any()
            or ids.max(initial=0) >= vocabulary
        ):
            raise ValueError(f"spans or ids of order {o} out of range")


class Ngrams:
    """The n-grams of a model. Without a table the unigrams are uniform."""

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
        unigrams = table.unigrams if table else []
        unseen = min(unigrams, default=1 / vocabulary)
        self.unigrams = [*unigrams, *[unseen] * (vocabulary - len(unigrams))]


class TextNgrams:
    """The n-grams of one growing text, combined with the table."""

    def __init__(self, ngrams: Ngrams) -> None:
        self.weights = ngrams.weights
        self.unigrams = ngrams.unigrams
        self._ngrams = ngrams
        self._read = 0  # the number of tokens that are already counted
        # The latest successors of each context with their counts, by the context's key.
        self._after: dict[int, dict[int, int]] = {}

    def extend(self, text: Sequence[int]) -> None:
        """Count the tokens of the text that are not counted yet."""
        if not self._ngrams.text:
            return
        for end in range(max(1, self._read), len(text)):
            token = text[end]
            keys = context_keys(text[max(0, end - LONGEST) : end])
            for length in TEXT_CONTEXTS:
                if length > len(keys):
                    break
                successors = self._after.setdefault(keys[length - 1], {})
                successors[token] = successors.pop(token, 0) + 1  # moves it to the end
                if len(successors) > RECENT:
                    del successors[next(iter(successors))]
        self._read = len(text)

    def successors(
        self, tail: Sequence[int]
    ) -> tuple[Shares, float, list[dict[int, int]]]:
        """Return p(c) / D of the successors of a text's last tokens, D, and the text's counts.

        The counts are a list with a dict for each context of the text, shortest first.
        """
        table = self._ngrams.table
        shares, D = Shares(), 1.0
        if table:
            keys = context_keys(tail)
            shares, D = table.successors(keys, self.weights.table)
        else:
            # Most tails are new to the text. Longer contexts are hashed only if the shortest
            # one has occurred before.
            keys = context_keys(tail[-TEXT_CONTEXTS[0] :])
            if keys[-1] in self._after:
                keys = context_keys(tail)
        κ = self.weights.text
        unigrams = self.unigrams
        counted: list[dict[int, int]] = []
        for length in TEXT_CONTEXTS:
            if length > len(keys):
                break
            counts = self._after.get(keys[length - 1])
            if counts is None:  # then a longer context has not occurred either
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
