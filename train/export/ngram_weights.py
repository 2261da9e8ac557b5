"""The weights of n-grams beside adaptive tokens, fitted on held-out windows.

Decoding accepts a draft that is the model's own choice y_j if all drafts before it were accepted. A window of
held-out text has these choices up to the first that is not the text's next token: behind that one the model
would write another text. (The next tokens themselves are no good measure: where the model did not expect them,
n-grams would weigh too much.) All places of a window follow the text's own tokens, so whether a draft is right,

    argmax_c (log p_j(c) + λ_j log s_j(c)) = y_j          with s of infer/ngrams.py,

does not depend on the other places' weights. The expected accepted drafts of a chain of L places, from windows
that end at different places (Kaplan and Meier, JASA 1958), are

    accepted = Σ_j Π_{i <= j} r_i        r_i: the share of right drafts among windows that have a place i and
                                             whose drafts before it are right

All values of small grids are tried. Each grid is in order of preference: of equals the first is chosen.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from conf.files import read_json, write_json
from data_prep.ngrams import TABLE
from infer.drafters.places import UNREAD, Places
from infer.engine.output import Candidates
from infer.ngrams import LONGEST, Ngrams, NgramTable, NgramWeights, TextNgrams
from train.export.sidecars import ADAPTIVE
from train.export.verify import LEVEL, Window, jackknife

DEFAULT = NgramWeights()
TABLES = (DEFAULT.table, 1.0, 4.0, 0.5, 0.25)
TEXTS = (DEFAULT.text, 0.5, 2.0, 0.25, 4.0)
PLACES = (DEFAULT.place(0), 0.3, 0.5, 0.2, 0.6, 0.1, 0.8, 0.0, 1.0, 1.4)
SWEEPS = 3  # over the places, at most


@dataclass(frozen=True)
class NgramFit:
    """The weights, and the expected accepted drafts of a chain by source: adaptive, ngrams, all."""

    weights: NgramWeights
    windows: int
    L: int
    accepted: dict[str, float]

    def describe(self) -> str:
        """Return the fit in one sentence."""
        weights = self.weights
        accepted = self.accepted
        places = " ".join(f"{λ:g}" for λ in weights.places)
        return (
            f"drafts accepted of {self.L}, on {self.windows} held-out windows: by adaptive tokens "
            f"{accepted['adaptive']:.2f}, by n-grams {accepted['ngrams']:.2f}, by both {accepted['all']:.2f} "
            f"(κ {weights.table:g} of the table, {weights.text:g} of the text, λ {places})"
        )


def fit_directory(out: Path, windows: Sequence[Window]) -> NgramFit | None:
    """Fit the weights and write them into adaptive.json; without windows write the defaults.

    `table` is null there if the directory has no table.
    """
    table = NgramTable(out / TABLE) if (out / TABLE).is_file() else None
    fit = (
        fit_ngrams(windows, table, read_json(out / "config.json")["vocab_size"])
        if windows
        else None
    )
    weights = fit.weights if fit else DEFAULT
    ngrams = {
        "table": weights.table if table else None,
        "text": weights.text,
        "places": list(weights.places),
    }
    write_json(out / ADAPTIVE, {**read_json(out / ADAPTIVE), "ngrams": ngrams})
    return fit


def fit_ngrams(
    windows: Sequence[Window], table: NgramTable | None, vocabulary: int
) -> NgramFit:
    """Return the weights that accept the most drafts of the windows; the model has `vocabulary` ids.

    Candidates are the defaults, then κ and one λ of all places, then κ and a λ_j of each place. A later one is
    chosen only if its gain over the one before is beyond noise.
    """
    ngrams = Ngrams(table, vocabulary)
    sequences = np.array([window.sequence for window in windows])
    pairs = [
        NgramWeights(*pair) for pair in product(TABLES if table else TABLES[:1], TEXTS)
    ]
    hits_PΛWL, known_WL = _hits(windows, ngrams, pairs)
    counts = np.array(
        [[count(hits, known_WL, sequences) for hits in row] for row in hits_PΛWL]
    )
    values = expected(counts.sum(3))
    pair, place = divmod(int(values.argmax()), len(PLACES))
    weights = DEFAULT
    before = counts[0, 0]
    if is_gain(before, counts[pair, place], tries=len(pairs) * len(PLACES)):
        weights = replace(pairs[pair], places=(PLACES[place],))
        before = counts[pair, place]
    by_place = [
        _fit_places(hits, known_WL, int(λ))
        for hits, λ in zip(hits_PΛWL, values.argmax(1))
    ]
    chains = [_chain(hits, λs) for hits, λs in zip(hits_PΛWL, by_place)]
    counts = np.array([count(hits, known_WL, sequences) for hits in chains])
    pair = int(expected(counts.sum(2)).argmax())
    if is_gain(
        before, counts[pair], tries=len(pairs) * len(PLACES) * known_WL.shape[1]
    ):
        weights = replace(pairs[pair], places=tuple(PLACES[λ] for λ in by_place[pair]))
    best = Ngrams(table, vocabulary, weights=weights)
    accepted = {
        "adaptive": accepted_drafts(windows, None),
        "ngrams": accepted_drafts(windows, best, adaptive=False),
        "all": accepted_drafts(windows, best),
    }
    return NgramFit(weights, len(windows), known_WL.shape[1], accepted)


def accepted_drafts(
    windows: Sequence[Window], ngrams: Ngrams | None, *, adaptive: bool = True
) -> float:
    """Return the expected accepted drafts of a chain, drafted by decoding's own drafter."""
    L = max(len(window.choices) for window in windows)
    hits_WL = np.zeros((len(windows), L), dtype=bool)
    known_WL = np.zeros((len(windows), L), dtype=bool)
    for hits, known, (window, text) in zip(hits_WL, known_WL, _texts(windows, ngrams)):
        answers = Candidates(window.ids, window.shares) if adaptive else None
        w = len(window.choices)
        places = Places(window.document[: window.root + 1], answers, text, 1)
        drafts = places.grow([0.0] * w, depth=w).tokens[1:]
        known[:w] = True
        hits[: len(drafts)] = [
            draft == choice for draft, choice in zip(drafts, window.choices)
        ]
    return float(
        expected(count(hits_WL, known_WL, np.zeros(len(windows), dtype=int)).sum(1))
    )


def _texts(
    windows: Sequence[Window], ngrams: Ngrams | None
) -> Iterator[tuple[Window, TextNgrams | None]]:
    """Yield each window with the n-grams of its text; windows of a document are adjacent, in order."""
    document = None
    text = None
    for window in windows:
        if ngrams and window.document is not document:
            document = window.document
            text = TextNgrams(ngrams)
        if text:
            text.extend(window.document[: window.root + 1])
        yield window, text


def _hits(
    windows: Sequence[Window], ngrams: Ngrams, pairs: Sequence[NgramWeights]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (P, Λ, W, L) bool: whether window w's draft for place j is right by pair p and λ of PLACES; and
    (W, L) bool: whether that place is known.
    """
    widths = np.array([len(window.choices) for window in windows])
    known = np.arange(widths.max()) < widths[:, None]
    hits = np.zeros((len(pairs), len(PLACES), *known.shape), dtype=bool)
    shares_QC, right_Q, question, column, tokens, chances = _candidates(
        windows, ngrams, pairs
    )
    frequencies = np.log(np.array(ngrams.unigrams)[tokens])
    for p in range(len(pairs)):
        evidence_QC = np.zeros_like(shares_QC)
        evidence_QC[question, column] = np.log(chances[p]) - frequencies
        for i, λ in enumerate(PLACES):
            hits[p, i][known] = (shares_QC + λ * evidence_QC).argmax(1) == right_Q
    return hits, known


def _candidates(
    windows: Sequence[Window], ngrams: Ngrams, pairs: Sequence[NgramWeights]
) -> tuple[Any, ...]:
    """Return the candidates of all Q places of all windows, as _hits reads them.

    (Q, C) log shares of the answers of adaptive tokens and of other successors by n-grams; (Q,) the column of
    the model's choice, -1 if it is no candidate; of each successor its row, column, token, and s by pair.
    """
    shares: list[list[float]] = []
    right: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    tokens: list[int] = []
    chances = [array("d") for _ in pairs]
    for window, text in _texts(windows, ngrams):
        assert text
        for j, choice in enumerate(window.choices):
            end = window.root + 1 + j
            tail = window.document[max(0, end - LONGEST) : end]
            for values, text.weights in zip(chances, pairs):
                successors = text.successors(tail)[0]
                values.extend(successors.values())
            places = {token: column for column, token in enumerate(window.ids[j])}
            answered = len(places)
            rows += [len(shares)] * len(successors)
            columns += [places.setdefault(token, len(places)) for token in successors]
            tokens += successors
            shares.append(
                window.shares[j]
                + [UNREAD * window.shares[j][-1]] * (len(places) - answered)
            )
            right.append(places.get(choice, -1))
    shares_QC = np.zeros((len(shares), max(map(len, shares))))
    for padded, answers in zip(shares_QC, shares):
        padded[: len(answers)] = answers
    with np.errstate(divide="ignore"):
        shares_QC = np.log(shares_QC)
    indices = (np.array(values, dtype=int) for values in (rows, columns, tokens))
    return (
        shares_QC,
        np.array(right),
        *indices,
        [np.frombuffer(values) for values in chances],
    )


def count(
    hits_WL: np.ndarray, known_WL: np.ndarray, sequences_W: np.ndarray
) -> np.ndarray:
    """Return (2, S, L) counts by sequence and place: windows that reach the place, and that are right there."""
    alive = np.logical_and.accumulate(hits_WL & known_WL, axis=1)
    reached = known_WL.copy()
    reached[:, 1:] &= alive[:, :-1]
    starts = np.flatnonzero(np.diff(sequences_W, prepend=-1))
    return np.stack([np.add.reduceat(x.astype(int), starts) for x in (reached, alive)])


def expected(counts: np.ndarray) -> np.ndarray:
    """Return the expected accepted drafts of (..., 2, L) counts."""
    reached, right = np.moveaxis(counts, -2, 0)
    accepted: np.ndarray = np.cumprod(right / np.maximum(reached, 1), axis=-1).sum(-1)
    return accepted


def is_gain(before: np.ndarray, after: np.ndarray, *, tries: int) -> bool:
    """Return whether (2, S, L) counts `after`, of the best of `tries` weights, are better beyond noise.

    By the jackknife over sequences, as in verify.py, at the level of one in `tries` (Bonferroni).
    """
    n = before.shape[1]
    gain = expected(after.sum(1)) - expected(before.sum(1))
    before, after = (
        np.moveaxis(c.sum(1, keepdims=True) - c, 1, 0) for c in (before, after)
    )  # one left out
    without = expected(after) - expected(before)
    return n > 1 and bool(gain > jackknife(without, 1 - (1 - LEVEL) / tries))


def _chain(hits_ΛWL: np.ndarray, λs: Sequence[int]) -> np.ndarray:
    """Return the (W, L) hits with each place's λ, given by its index in PLACES."""
    return np.stack([hits_ΛWL[λ, :, j] for j, λ in enumerate(λs)], axis=1)


def _fit_places(hits_ΛWL: np.ndarray, known_WL: np.ndarray, start: int) -> list[int]:
    """Return the index in PLACES of each place's λ, by coordinate search from `start` for all places."""
    chosen = [start] * hits_ΛWL.shape[2]
    every = np.zeros(len(known_WL), dtype=int)

    def value(λs: Sequence[int]) -> float:
        return float(expected(count(_chain(hits_ΛWL, λs), known_WL, every).sum(1)))

    for _ in range(SWEEPS):
        before = list(chosen)
        for j, own in enumerate(before):
            order = [own, *range(len(PLACES))]  # of equals the first
            chosen[j] = max(
                order, key=lambda λ: value([*chosen[:j], λ, *chosen[j + 1 :]])
            )
        if chosen == before:
            break
    return chosen
