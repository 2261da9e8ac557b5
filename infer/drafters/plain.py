"""No drafts: plain autoregressive decoding, the baseline of every other drafter."""

from collections.abc import Sequence

from infer.tree import Tree


class PlainDrafter:
    """Proposes the root alone."""

    max_rows = 1

    def begin(self) -> None:
        """Nothing to forget."""

    def propose(self, root: int) -> Tree:
        """The root."""
        return Tree.chain(root)

    def observe(self, tree: Tree, path: Sequence[int], choices: Sequence[int]) -> None:
        """Nothing to learn."""
