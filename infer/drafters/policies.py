"""Policies that learn, kept for later texts of the same kind."""

from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeVar

from infer.drafters.auto import WIDTH, AutoPolicy
from infer.drafters.costs import Costs, context_of, work
from infer.engine.sampling import Sampling

MOST = 64  # policies of a kind: a server may hear of another temperature with every text


class Learner(Protocol):
    """What learns L(q), of one model or of several."""

    @property
    def tables(self) -> Sequence[Costs]:
        """As they stand."""
        ...


L = TypeVar("L", bound=Learner)


class Learners(Generic[L]):
    """One for each kind, batch, length class and sampling. Nothing in here refers to their model."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._learners = dict[tuple[Hashable, tuple[int, int], Sampling], L]()

    def find(
        self,
        kind: Hashable,
        *,
        batch: int,
        capacity: int,
        sampling: Sampling,
        load: Callable[[], Sequence[Costs]],
        new: Callable[[Sequence[Costs]], L],
    ) -> L:
        """Return the one for `batch` texts of up to `capacity` tokens. Where there is none yet, a `new` one
        with what another with the same work learned of L(q), or with what `load` returns.
        """
        texts = (batch, context_of(capacity))
        key = (kind, texts, sampling)
        with self._lock:
            learner = self._learners.pop(key, None) or new(self._tables(texts, sampling) or load())
            self._learners[key] = learner  # now the last to be forgotten
            if len(self._learners) > MOST:
                del self._learners[next(iter(self._learners))]
            return learner

    def _tables(self, texts: tuple[int, int], sampling: Sampling) -> Sequence[Costs]:
        alike = [
            learner
            for (_, of, way), learner in self._learners.items()
            if of == texts and work(way) == work(sampling)
        ]
        return alike[-1].tables if alike else ()


class Policies:
    """The policies of one model; the number of probes and the sources of drafts are their kind."""

    def __init__(self) -> None:
        self._learners = Learners[AutoPolicy]()

    def auto(
        self,
        k: int,
        sources: frozenset[str],
        *,
        batch: int,
        capacity: int,
        sampling: Sampling,
        load: Callable[[], Sequence[Costs]],
        save: Callable[[Costs], None] | None = None,
    ) -> AutoPolicy:
        """See Learners; `save` is given what was learned of L(q), from time to time."""
        return self._learners.find(
            (k, sources),
            batch=batch,
            capacity=capacity,
            sampling=sampling,
            load=load,
            new=lambda tables: AutoPolicy(tables[0], k, width=1 if sampling.temperature else WIDTH, save=save),
        )
