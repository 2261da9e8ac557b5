"""The tokens in the rows of probes: adaptive ones, one existing token, or noise. Pure.

The model directory's adaptive.json says which (train/export/sidecars.py). Losslessness needs
no rule here: probes are never accepted, so they change how many drafts are right, never a
text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MaskTokens:
    """The mask tokens of a model; empty for a model without any.

    One of `ids` serves every place, several are those of the places in order (diverse
    tokens). With `noise` they are drawn uniformly from the ids below it, anew at every
    length of a text, as the servers of Uno do (arXiv 2609.04010).
    """

    ids: tuple[int, ...] = ()
    noise: int = 0

    def __bool__(self) -> bool:
        return bool(self.ids) or self.noise > 0

    @property
    def most(self) -> int | None:
        """The most mask tokens in a row; None if there is no limit."""
        return None if self.noise or len(self.ids) == 1 else len(self.ids)

    def check(self, k: int) -> None:
        """Raise ValueError for a k that is not positive, or beyond the diverse ids."""
        if k < 1 or (self.most is not None and k > self.most):
            bounds = "at least 1" if self.most is None else f"1 to {self.most}"
            raise ValueError(f"k must be {bounds} adaptive tokens, got {k}")

    def row(self, k: int, *, seed: int = 0, length: int = 0) -> tuple[int, ...]:
        """Return the ids of k probes in a row; those of fewer probes are the first ones.

        Noise depends on the `seed` of a sequence and the `length` of its text alone, so
        ranks agree, and neither a batch nor a tree's shape changes a draft. Raises
        ValueError as `check` does.
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
    """Return the mask tokens of a model whose embedding has `vocabulary` rows."""
    return MaskTokens(noise=vocabulary) if noise else MaskTokens(tuple(ids))
