"""No drafts: plain autoregressive decoding, the baseline of every other drafter."""

from collections.abc import Sequence

from infer.engine.reading import Candidates
from infer.trees.tree import Tree


class PlainDrafter:
    """Proposes the root alone."""

    max_rows = 1
    width = 1

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """The root."""
        return Tree.chain(context[-1])

    def observe(
        self, tree: Tree, path: Sequence[int], choice: int, drafts: Candidates | None, rows: int
    ) -> None:
        """Nothing to learn."""
