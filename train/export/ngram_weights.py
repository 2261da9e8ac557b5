"""The weights of n-grams beside adaptive tokens, fitted on held-out windows.

Decoding accepts a draft that is the model's own choice y_j if all drafts before it were
accepted. A window of held-out text has these choices up to the first one that is not the
text's next token: behind it the model would write another text. (The next tokens themselves
are no good target: where the model did not expect them, n-grams would weigh too much.)

Windows end at different places, so the expected accepted drafts of a chain of L places are
(Kaplan and Meier, JASA 1958)

    accepted = Σ_j Π_{i <= j} r_i

where r_i is the share of right drafts among the windows that have a place i and whose drafts
before it are right. All weights of a small grid are tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from scipy.stats import ttest_rel

from conf.files import read_json, write_json
from data_prep.ngrams import TABLE
from infer.drafters.places import Places
from infer.engine.output import Candidates
from infer.ngrams import Ngrams, NgramTable, NgramWeights, TextNgrams
from train.export.sidecars import ADAPTIVE
from train.export.verify import Window

DEFAULT = NgramWeights()
# Of equal values the first is chosen.
GRID = [
    NgramWeights(*weights)
    for weights in product(
        (DEFAULT.table, 4.0, 1.0, 0.25),
        (DEFAULT.text, 4.0, 2.0, 0.25),
        [(λ,) for λ in (*DEFAULT.places, 0.5, 0.3, 0.7, 0.2, 1.0, 1.4)],
    )
]
LEVEL = 0.05  # of significance, divided by the number of tries (Bonferroni)


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
        return (
            f"drafts accepted of {self.L}, on {self.windows} held-out windows: "
            f"by adaptive tokens {accepted['adaptive']:.2f}, "
            f"by n-grams {accepted['ngrams']:.2f}, by both {accepted['all']:.2f} "
            f"(κ {weights.table:g} of the table, {weights.text:g} of the text, λ {weights.places[0]:g})"
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
    known_W = np.array([len(window.choices) for window in windows])

    @cache
    def accepted(weights: NgramWeights) -> np.ndarray:
        return accepted_drafts(windows, Ngrams(table, vocabulary, weights=weights))

    def drafts(weights: NgramWeights) -> float:
        return expected(accepted(weights), known_W)

    grid = GRID if table else [w for w in GRID if w.table == DEFAULT.table]
    weights = max(grid, key=drafts)
    if weights != DEFAULT:
        gain = ttest_rel(accepted(weights), accepted(DEFAULT), alternative="greater")
        if not gain.pvalue < LEVEL / len(grid):
            weights = DEFAULT
    fitted = Ngrams(table, vocabulary, weights=weights)
    alone = {
        "adaptive": accepted_drafts(windows, None),
        "ngrams": accepted_drafts(windows, fitted, adaptive=False),
        "all": accepted(weights),
    }
    by_source = {name: expected(count, known_W) for name, count in alone.items()}
    return NgramFit(weights, len(windows), int(known_W.max()), by_source)


def accepted_drafts(
    windows: Sequence[Window], ngrams: Ngrams | None, *, adaptive: bool = True
) -> np.ndarray:
    """Return (W,) accepted drafts of each window, drafted by decoding's drafter.

    Windows of a document are adjacent, in order.
    """
    document = None
    text = None
    counts = []
    for window in windows:
        if ngrams and window.document is not document:
            document = window.document
            text = TextNgrams(ngrams)
        answers = Candidates(window.ids, window.shares) if adaptive else None
        w = len(window.choices)
        places = Places(window.document[: window.root + 1], answers, text, 1)
        drafts = places.grow([0.0] * w, depth=w).tokens[1:]
        right = np.equal(drafts, window.choices[: len(drafts)])
        counts.append(int(np.logical_and.accumulate(right).sum()))
    return np.array(counts)


def expected(accepted_W: np.ndarray, known_W: np.ndarray) -> float:
    """Return the expected accepted drafts of a chain; windows have `known_W` places."""
    places = np.arange(known_W.max())[:, None]
    reached = ((known_W > places) & (accepted_W >= places)).sum(1)
    right = (accepted_W > places).sum(1)
    return float(np.cumprod(right / np.maximum(reached, 1)).sum())
