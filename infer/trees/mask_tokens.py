"""Mask tokens, the inputs of probe rows: adaptive tokens, one existing token, or noise. Pure.

The model directory's adaptive.json selects the kind (train/export/sidecars.py). Any choice is
lossless: probes are never accepted, so they change only how many drafts are right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MaskTokens:
    """The mask tokens of a model; empty for a model without mask tokens.

    A single id in `ids` serves every probe; with several (diverse tokens) the n-th probe
    gets the n-th id. With `noise` the ids are drawn uniformly from 0 .. noise - 1, anew at
    each length of the text, as Uno's servers do (arXiv 2609.04010).
    """

    ids: tuple[int, ...] = ()
    noise: int = 0

    def __bool__(self) -> bool:
        return bool(self.ids) or self.noise > 0

    @property
    def most(self) -> int | None:
        """Return the largest number of consecutive probes; None if there is no limit."""
        return None if self.noise or len(self.ids) == 1 else len(self.ids)

    def check(self, k: int) -> None:
        """Raise ValueError if k is not positive or exceeds the number of diverse ids."""
        if k < 1 or (self.most is not None and k > self.most):
            bounds = "at least 1" if self.most is None else f"1 to {self.most}"
            raise ValueError(f"k must be {bounds} adaptive tokens in a row, got {k}")

    def row(self, k: int, *, seed: int = 0, length: int = 0) -> tuple[int, ...]:
        """Return the ids of k consecutive probes; a smaller k returns a prefix of them.

        Noise depends only on the sequence's `seed` and the `length` of its text, so ranks
        agree, and neither the batch nor the tree's shape changes a draft. Raises ValueError
        for an invalid k (see `check`).
        """
        if k == 0:
            return ()
        self.check(k)
        if self.noise:
            drawn = np.random.default_rng((seed, length)).integers(self.noise, size=k)
            return tuple(drawn.tolist())
        return self.ids[:k] if len(self.ids) > 1 else self.ids * k


NO_MASK = MaskTokens()


def mask_tokens(ids: Sequence[int], *, noise: bool, vocabulary: int) -> MaskTokens:
    """Return the mask tokens of a model with `vocabulary` rows in its embedding."""
    return MaskTokens(noise=vocabulary) if noise else MaskTokens(tuple(ids))
