"""The weights of n-grams beside adaptive tokens, fitted on held-out windows.

Decoding accepts a draft that is the model's own choice y_j if all drafts before it were
accepted. A window of held-out text has these choices up to the first one that is not the
text's next token: behind it the model would write another text. (The next tokens themselves
are no good target: where the model did not expect them, n-grams would weigh too much.) All
places of a window follow the text's own tokens, so that the draft of a place,

    argmax_c (log p_j(c) + λ_j log s_j(c))          with s of infer/ngrams.py,

does not depend on the weights of other places. Windows end at different places, so the
expected accepted drafts of a chain of L places are (Kaplan and Meier, JASA 1958)

    accepted = Σ_j Π_{i <= j} r_i

where r_i is the share of right drafts among the windows that have a place i and whose drafts
before it are right. All values of small grids are tried. Each grid is in order of preference:
of equal values the first is chosen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

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
    """The weights, and expected accepted drafts by source: adaptive, ngrams, all."""

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
            f"drafts accepted of {self.L}, on {self.windows} held-out windows: "
            f"by adaptive tokens {accepted['adaptive']:.2f}, "
            f"by n-grams {accepted['ngrams']:.2f}, by both {accepted['all']:.2f} "
            f"(κ {weights.table:g} of the table, {weights.text:g} of the text, λ {places})"
        )


def fit_directory(out: Path, windows: Sequence[Window]) -> NgramFit | None:
    """Write fitted weights into adaptive.json, or the defaults if there are no windows.

    `table` is null there if the directory has no table. Return None if nothing was fitted:
    without windows, or for a model without adaptive tokens.
    """
    if not (out / ADAPTIVE).is_file():
        return None
    table = NgramTable(out / TABLE) if (out / TABLE).is_file() else None
    fit = None
    weights = DEFAULT
    if windows:
        fit = fit_ngrams(windows, table, read_json(out / "config.json")["vocab_size"])
        weights = fit.weights
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
    """Return the weights that accept the most drafts of the windows.

    The model has `vocabulary` ids. The defaults stay unless the gain is beyond noise.
    """
    ngrams = Ngrams(table, vocabulary)
    sequences = np.array([window.sequence for window in windows])
    tables = TABLES if table else TABLES[:1]
    pairs = [NgramWeights(*pair) for pair in product(tables, TEXTS)]
    hits_PΛWL, known_WL = find_hits(windows, ngrams, pairs)
    by_place = [fit_places(hits, known_WL) for hits in hits_PΛWL]
    chains = [_chain(hits, λs) for hits, λs in zip(hits_PΛWL, by_place)]
    counts = [count(hits, known_WL, sequences) for hits in chains]
    best = int(np.argmax([expected(values.sum(1)) for values in counts]))
    before = count(hits_PΛWL[0, 0], known_WL, sequences)
    L = known_WL.shape[1]
    tries = len(pairs) * len(PLACES) * L
    weights = DEFAULT
    if is_gain(before, counts[best], tries=tries):
        weights = replace(pairs[best], places=tuple(PLACES[λ] for λ in by_place[best]))
    fitted = Ngrams(table, vocabulary, weights=weights)
    accepted = {
        "adaptive": accepted_drafts(windows, None),
        "ngrams": accepted_drafts(windows, fitted, adaptive=False),
        "all": accepted_drafts(windows, fitted),
    }
    return NgramFit(weights, len(windows), L, accepted)


def accepted_drafts(
    windows: Sequence[Window], ngrams: Ngrams | None, *, adaptive: bool = True
) -> float:
    """Return the expected accepted drafts of a chain, drafted by decoding's drafter."""
    hits_WL, known_WL = _empty(windows)
    for hits, known, (window, text) in zip(hits_WL, known_WL, _texts(windows, ngrams)):
        answers = Candidates(window.ids, window.shares) if adaptive else None
        w = len(window.choices)
        places = Places(window.document[: window.root + 1], answers, text, 1)
        drafts = places.grow([0.0] * w, depth=w).tokens[1:]
        known[:w] = True
        hits[: len(drafts)] = np.equal(drafts, window.choices[: len(drafts)])
    sequences = np.zeros(len(windows), dtype=int)
    return float(expected(count(hits_WL, known_WL, sequences).sum(1)))


def _empty(windows: Sequence[Window]) -> tuple[np.ndarray, np.ndarray]:
    """Return two (W, L) arrays of False."""
    L = max(len(window.choices) for window in windows)
    shape = (len(windows), L)
    return np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)


def _texts(
    windows: Sequence[Window], ngrams: Ngrams | None
) -> Iterator[tuple[Window, TextNgrams | None]]:
    """Yield each window with the n-grams of its text.

    Windows of a document are adjacent, in order.
    """
    document = None
    text = None
    for window in windows:
        if ngrams and window.document is not document:
            document = window.document
            text = TextNgrams(ngrams)
        if text:
            text.extend(window.document[: window.root + 1])
        yield window, text


def find_hits(
    windows: Sequence[Window], ngrams: Ngrams, pairs: Sequence[NgramWeights]
) -> tuple[np.ndarray, np.ndarray]:
    """Return which drafts are right (P, Λ, W, L), and which places are known (W, L).

    A draft of window w at place j is right if it is the model's choice, by pair p of κ and
    one λ of PLACES. The candidates of a place are the answers of adaptive tokens, and the
    successors by n-grams with the share UNREAD of the last answer's.
    """
    hits_WL, known_WL = _empty(windows)
    hits_PΛWL = np.zeros((len(pairs), len(PLACES), *hits_WL.shape), dtype=bool)
    unigrams = np.array(ngrams.unigrams)
    λ_Λ = np.array(PLACES)[:, None]
    for w, (window, text) in enumerate(_texts(windows, ngrams)):
        assert text
        known_WL[w, : len(window.choices)] = True
        for j, choice in enumerate(window.choices):
            end = window.root + 1 + j
            tail = window.document[max(0, end - LONGEST) : end]
            chances_PS = []
            for text.weights in pairs:
                successors = text.successors(tail)[0]
                chances_PS.append(list(successors.values()))
            tokens = list(dict.fromkeys([*window.ids[j], *successors]))
            if choice not in tokens:
                continue
            shares_C = np.full(len(tokens), UNREAD * window.shares[j][-1])
            shares_C[: len(window.ids[j])] = window.shares[j]
            evidence_PC = np.zeros((len(pairs), len(tokens)))
            columns = [tokens.index(token) for token in successors]
            evidence = np.log(chances_PS) - np.log(unigrams[list(successors)])
            evidence_PC[:, columns] = evidence
            with np.errstate(divide="ignore"):
                scores_PΛC = np.log(shares_C) + λ_Λ * evidence_PC[:, None]
            hits_PΛWL[:, :, w, j] = scores_PΛC.argmax(-1) == tokens.index(choice)
    return hits_PΛWL, known_WL


def count(
    hits_WL: np.ndarray, known_WL: np.ndarray, sequences_W: np.ndarray
) -> np.ndarray:
    """Return (2, S, L) counts of windows by sequence: those that reach place j, and right ones."""
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
    """Return True if (2, S, L) counts `after`, the best of `tries`, are better beyond noise.

    By the jackknife over sequences, as in verify.py, at a level for all tries (Bonferroni).
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


def fit_places(hits_ΛWL: np.ndarray, known_WL: np.ndarray) -> list[int]:
    """Return the index in PLACES of each place's λ, by coordinate search."""
    L = known_WL.shape[1]
    sequences = np.zeros(len(known_WL), dtype=int)

    def value(λs: Sequence[int]) -> float:
        hits = _chain(hits_ΛWL, λs)
        return float(expected(count(hits, known_WL, sequences).sum(1)))

    chosen = max(([λ] * L for λ in range(len(PLACES))), key=value)
    for _ in range(SWEEPS):
        for j in range(L):
            order = [chosen[j], *range(len(PLACES))]  # of equals the first
            tries = [[*chosen[:j], λ, *chosen[j + 1 :]] for λ in order]
            chosen = max(tries, key=value)
    return chosen
