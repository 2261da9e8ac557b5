"""What learns, by the texts that it serves, and what rows cost there, kept for later texts."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from infer.drafters.auto import WIDTH, AutoPolicy
from infer.drafters.costs import Costs, context_of, work
from infer.engine.sampling import Sampling

MOST = 64  # of a kind that are kept: a server may hear of another temperature with every text
Value = TypeVar("Value")
Learner = TypeVar("Learner")
Measured = TypeVar("Measured")


class Learners(Generic[Learner, Measured]):
    """Those of one model, to which nothing in here refers.

    What is learned holds for one sampling. What was measured holds for all that compute as much.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._learned = dict[Hashable, Learner]()
        self._measured = dict[Hashable, Measured]()

    def find(
        self,
        kind: Hashable,
        *,
        batch: int,
        capacity: int,
        sampling: Sampling,
        measure: Callable[[], Measured],
        new: Callable[[Measured], Learner],
    ) -> Learner:
        """The one of a kind for `batch` such texts of up to `capacity` tokens; where there is none yet, a `new`
        one of what rows cost, which `measure` says where it is not known either.
        """
        texts = (batch, context_of(capacity))

        def begin() -> Learner:
            return new(_kept(self._measured, (*texts, work(sampling)), measure))

        with self._lock:  # what two threads measured side by side would be the cost of neither
            return _kept(self._learned, (kind, *texts, sampling), begin)


class Policies:
    """The policies that learn, of one model; the number of probes and the sources of drafts are their kind."""

    def __init__(self) -> None:
        self._learners = Learners[AutoPolicy, Costs]()

    def auto(
        self,
        k: int,
        sources: frozenset[str],
        *,
        batch: int,
        capacity: int,
        sampling: Sampling,
        measure: Callable[[], Costs],
    ) -> AutoPolicy:
        """See Learners; `measure` says L(q)."""
        return self._learners.find(
            (k, sources),
            batch=batch,
            capacity=capacity,
            sampling=sampling,
            measure=measure,
            new=lambda costs: AutoPolicy(costs, k, width=1 if sampling.temperature else WIDTH),
        )


def _kept(known: dict[Hashable, Value], key: Hashable, make: Callable[[], Value]) -> Value:
    """The one of this key, now the last to be forgotten; made where there is none."""
    known[key] = found = known.pop(key) if key in known else make()
    if len(known) > MOST:
        del known[next(iter(known))]  # the one unused for longest
    return found
