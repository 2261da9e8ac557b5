"""The weights of n-grams beside adaptive tokens, fitted on held-out windows.

A draft reaches place j of a window only where all drafts before it are right. So the tokens before each place
are the text's own, whether a place is right depends on its own λ_j alone, and the drafts that a chain of L
places may expect to be accepted are, by κ of the table, κ of the text and λ,

    accepted = Σ_j mean over windows with a place j of Π_{i <= j} [argmax_c (log p_i(c) + λ_i log s_i(c)) = y_i]

with s of infer/ngrams.py. All values of small grids are tried; those of each grid stand in the order in which
they are preferred, so that of equal ones the default or the nearest to it is chosen.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from conf.files import read_json, write_json
from data_prep.ngrams import TABLE
from infer.drafters.places import UNREAD, Places
from infer.engine.reading import Candidates
from infer.ngrams import LONGEST, Ngrams, NgramTable, NgramWeights, TextNgrams
from train.export.acceptance import LEVEL, Window, student

DEFAULT = NgramWeights()
TABLES = (DEFAULT.table, 1.0, 4.0, 0.5, 0.25)
TEXTS = (DEFAULT.text, 0.5, 2.0, 0.25, 4.0)
PLACES = (DEFAULT.place(0), 0.3, 0.5, 0.2, 0.6, 0.1, 0.8, 0.0, 1.0, 1.4)
SWEEPS = 3  # over the places, at most
DESCRIBED = "adaptive.json"


@dataclass(frozen=True)
class NgramFit:
    """The weights, and the expected accepted drafts of a chain by source: adaptive, ngrams, all."""

    weights: NgramWeights
    windows: int
    L: int
    accepted: dict[str, float]


def fit_directory(out: Path, windows: Sequence[Window]) -> NgramFit | None:
    """Fit the weights for a model directory and write them into its adaptive.json: defaults without windows.

    `table` is null there where the directory has no table.
    """
    path, table = out / TABLE, None
    if path.is_file():
        table = NgramTable(path)
    fit = None
    if windows:
        fit = fit_ngrams(windows, table, read_json(out / "config.json")["vocab_size"])
    weights = fit.weights if fit else DEFAULT
    ngrams = {"table": weights.table if table else None, "text": weights.text, "places": list(weights.places)}
    write_json(out / DESCRIBED, {**read_json(out / DESCRIBED), "ngrams": ngrams})
    return fit


def describe_fit(fit: NgramFit) -> str:
    """Return what an export prints."""
    weights, accepted = fit.weights, fit.accepted
    places = " ".join(f"{λ:g}" for λ in weights.places)
    return (
        f"drafts accepted of {fit.L}, on {fit.windows} held-out windows: {accepted['adaptive']:.2f} by adaptive "
        f"tokens, {accepted['ngrams']:.2f} by n-grams, {accepted['all']:.2f} by both with the fitted weights "
        f"(κ {weights.table:g} of the table, {weights.text:g} of the text, λ {places})"
    )


def fit_ngrams(windows: Sequence[Window], table: NgramTable | None, vocabulary: int) -> NgramFit:
    """Return the weights that accept the most drafts of the windows.

    Three sets of weights compete: the defaults; κ and a λ of all places; and with these κ a λ_j of each place.
    A later one is chosen only where its gain over the one before is beyond noise. `vocabulary` is the number of
    the model's ids.
    """
    ngrams = Ngrams(table, vocabulary)
    pairs = [NgramWeights(*pair) for pair in product(TABLES if table else TABLES[:1], TEXTS)]
    sequences, L = np.array([window.sequence for window in windows]), max(len(w.ids) for w in windows)
    hits_PΛWL = _hits(windows, ngrams, pairs)
    values = np.array([[_contributions(hits, windows).sum() for hits in row] for row in hits_PΛWL])
    pair, place = divmod(int(values.argmax()), len(PLACES))
    weights, hits = replace(DEFAULT), hits_PΛWL[0, 0]
    fitted = replace(pairs[pair], places=(PLACES[place],))
    if _is_gain(_contributions(hits_PΛWL[pair, place], windows) - _contributions(hits, windows), sequences):
        weights, hits = fitted, hits_PΛWL[pair, place]
    pair = pairs.index(replace(weights, places=DEFAULT.places))
    by_place = _fit_places(hits_PΛWL[pair], PLACES.index(weights.place(0)), windows)
    chosen = np.stack([hits_PΛWL[pair, λ, :, j] for j, λ in enumerate(by_place)], axis=1)
    if _is_gain(_contributions(chosen, windows) - _contributions(hits, windows), sequences):
        weights = replace(weights, places=tuple(PLACES[λ] for λ in by_place))
    best = Ngrams(table, vocabulary, weights=weights)
    accepted = {
        "adaptive": expected_accepted(windows, None),
        "ngrams": expected_accepted(windows, best, adaptive=False),
        "all": expected_accepted(windows, best),
    }
    return NgramFit(weights, len(windows), L, accepted)


def expected_accepted(windows: Sequence[Window], ngrams: Ngrams | None, *, adaptive: bool = True) -> float:
    """Return the drafts of a chain that are accepted, as decoding chooses them, in expectation."""
    hits = np.zeros((len(windows), max(len(window.ids) for window in windows)), dtype=bool)
    for w, (window, text) in enumerate(_texts(windows, ngrams)):
        answers, count = Candidates(window.ids, window.shares) if adaptive else None, len(window.ids)
        places = Places(window.document[: window.root + 1], answers, text, 1)
        drafts = places.grow([0.0] * count, depth=count).tokens[1:]
        hits[w, : len(drafts)] = [draft == target for draft, target in zip(drafts, window.targets)]
    return float(_contributions(hits, windows).sum())


def _texts(windows: Sequence[Window], ngrams: Ngrams | None) -> Iterator[tuple[Window, TextNgrams | None]]:
    """Yield each window with the n-grams of its text; windows of a document stand side by side, in order."""
    document, text = None, None
    for window in windows:
        if ngrams and window.document is not document:
            document, text = window.document, TextNgrams(ngrams)
        if text:
            text.extend(window.document[: window.root + 1])
        yield window, text


def _hits(windows: Sequence[Window], ngrams: Ngrams, pairs: Sequence[NgramWeights]) -> np.ndarray:
    """Return (P, Λ, W, L) bool: whether window w's draft for place j is right by pair p and λ of PLACES."""
    rows = [(w, j) for w, window in enumerate(windows) for j in range(len(window.ids))]
    at = tuple(np.array(rows).T)
    hits = np.zeros((len(pairs), len(PLACES), len(windows), max(at[1]) + 1), dtype=bool)
    shares_QC, right_Q, question, column, tokens, chances = _candidates(windows, ngrams, pairs)
    frequencies = np.log(np.array(ngrams.unigrams)[tokens])
    for p in range(len(pairs)):
        evidence_QC = np.zeros_like(shares_QC)
        evidence_QC[question, column] = np.log(chances[p]) - frequencies
        for i, λ in enumerate(PLACES):
            hits[p, i][at] = (shares_QC + λ * evidence_QC).argmax(1) == right_Q
    return hits


def _candidates(windows: Sequence[Window], ngrams: Ngrams, pairs: Sequence[NgramWeights]) -> tuple[Any, ...]:
    """Return the candidates of all Q places of all windows.

    (Q, C) log shares of the adaptive tokens' answers, and of what n-grams propose besides; (Q,) the column of
    the true token, -1 where it is no candidate. Then, for each of n successors by n-grams: its row, its column,
    its token, and by the weights of each pair its s.
    """
    shares, right = list[list[float]](), list[int]()
    rows, columns, tokens = list[int](), list[int](), list[int]()
    chances = [array("d") for _ in pairs]
    for window, text in _texts(windows, ngrams):
        assert text
        for j, target in enumerate(window.targets):
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
            shares.append(window.shares[j] + [UNREAD * window.shares[j][-1]] * (len(places) - answered))
            right.append(places.get(target, -1))
    shares_QC = np.zeros((len(shares), max(map(len, shares))))
    for padded, answers in zip(shares_QC, shares):
        padded[: len(answers)] = answers
    with np.errstate(divide="ignore"):
        shares_QC = np.log(shares_QC)
    indices = (np.array(values, dtype=int) for values in (rows, columns, tokens))
    return shares_QC, np.array(right), *indices, [np.frombuffer(values) for values in chances]


def _contributions(hits_WL: np.ndarray, windows: Sequence[Window]) -> np.ndarray:
    """Return what each window adds to the expected accepted drafts, (W,)."""
    widths = np.array([len(window.ids) for window in windows])
    counts_L = (widths[:, None] > np.arange(hits_WL.shape[1])).sum(0)
    contributions: np.ndarray = (np.logical_and.accumulate(hits_WL, axis=1) / counts_L).sum(1)
    return contributions


def _is_gain(gains_W: np.ndarray, sequences_W: np.ndarray) -> bool:
    """Return whether the sum of gains is above 0 beyond noise: by sequences, which chance draws."""
    sums = np.bincount(np.unique(sequences_W, return_inverse=True)[1], gains_W)
    n = len(sums)
    return n > 1 and bool(sums.sum() > student(LEVEL, n - 1) * sqrt(n * sums.var(ddof=1)))


def _fit_places(hits_ΛWL: np.ndarray, start: int, windows: Sequence[Window]) -> list[int]:
    """Return the index in PLACES of each place's λ, by coordinate search from one of all places."""
    L = hits_ΛWL.shape[2]
    chosen = [start] * L

    def value(λs: Sequence[int]) -> float:
        hits = np.stack([hits_ΛWL[λ, :, j] for j, λ in enumerate(λs)], axis=1)
        return float(_contributions(hits, windows).sum())

    for _ in range(SWEEPS):
        before = list(chosen)
        for j in range(L):
            order = [chosen[j], *range(len(PLACES))]  # of equal ones the first
            chosen[j] = max(order, key=lambda λ: value([*chosen[:j], λ, *chosen[j + 1 :]]))
        if chosen == before:
            break
    return chosen
