"""No drafts: plain autoregressive decoding, the baseline of every other drafter."""

from collections.abc import Sequence

from infer.engine.reading import Candidates, Request
from infer.engine.sampling import Sampling
from infer.trees.tree import Tree


class PlainDrafter:
    """Proposes the root alone."""

    max_rows = 1
    width = 1

    def start(self, request: Request, sampling: Sampling) -> None:
        """No matter which."""

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """The root."""
        return Tree.chain(context[-1])

    def observe(
        self,
        tree: Tree,
        path: Sequence[int],
        choice: int,
        answers: Candidates | None,
        rows: int,
        seconds: float,
    ) -> None:
        """Nothing to learn."""
