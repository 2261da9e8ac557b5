"""Prompt lookup (Saxena, 2023): what followed the last words, where they stood before.

The draft is a chain of up to k tokens behind the latest earlier place of the text's last three,
two or one tokens. No model drafts, so it costs nothing where a text repeats itself, as code does.
"""

from collections.abc import Sequence

from infer.engine.reading import Candidates
from infer.trees.tree import Tree

NGRAMS = (3, 2, 1)


class PromptLookupDrafter:
    """Drafts by copying from the text itself."""

    width = 1

    def __init__(self, k: int) -> None:
        """Raises ValueError for a k that is not positive."""
        if k < 1:
            raise ValueError(f"k: wanted at least 1 token to look up, found {k}")
        self._k, self.max_rows = k, 1 + k
        self._read = 0  # tokens of the text in the index
        self._after: dict[tuple[int, ...], int] = {}  # where the latest place of these tokens ends

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """The tokens behind the latest place where the text's end stood before."""
        self._index(context)
        for n in NGRAMS:
            start = self._after.get(tuple(context[-n:]))
            if start is not None and n < len(context):
                return Tree.chain(context[-1], context[start : start + min(self._k, left - 1)])
        return Tree.chain(context[-1])

    def observe(
        self, tree: Tree, path: Sequence[int], choice: int, drafts: Candidates | None, rows: int
    ) -> None:
        """Nothing to learn: the next text says it all."""

    def _index(self, context: Sequence[int]) -> None:
        """Every place but the text's end itself, each token once."""
        for end in range(self._read + 1, len(context)):
            for n in NGRAMS:
                if n <= end:
                    self._after[tuple(context[end - n : end])] = end
        self._read = max(self._read, len(context) - 1)
