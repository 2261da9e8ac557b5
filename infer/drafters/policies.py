"""Policies that learn, by the texts that they serve, and what rows cost there, kept for later texts."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from infer.drafters.auto import AutoPolicy
from infer.drafters.costs import Costs, context_of, work
from infer.engine.sampling import Sampling

MOST = 64  # of a kind that are kept: a server may hear of another temperature with every text
Value = TypeVar("Value")


class Policies:
    """Of one model, to which nothing in here refers.

    What is learned holds for one sampling. What rows cost holds for all that compute as much.
    """

    def __init__(self) -> None:
        self._learned = dict[Hashable, AutoPolicy]()
        self._costs = dict[Hashable, Costs]()

    def auto(
        self, k: int, *, batch: int, capacity: int, sampling: Sampling, measure: Callable[[], Costs]
    ) -> AutoPolicy:
        """The one that learns, for `batch` such texts of up to `capacity` tokens; `measure` says L(q) where it
        is not known yet.
        """
        texts = (batch, context_of(capacity))

        def new() -> AutoPolicy:
            return AutoPolicy(_kept(self._costs, (*texts, work(sampling)), measure), k)

        return _kept(self._learned, (k, *texts, sampling), new)


def _kept(known: dict[Hashable, Value], key: Hashable, make: Callable[[], Value]) -> Value:
    """The one of this key, now the last to be forgotten; made where there is none."""
    known[key] = found = known.pop(key) if key in known else make()
    if len(known) > MOST:
        del known[next(iter(known))]  # the one unused for longest
    return found
