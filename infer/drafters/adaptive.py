"""SDSAT's two forwards per loop (SDSAT §2.1.1, eq. 1-3).

Forward 1 is the last token with k adaptive tokens as probes: it gives y_{n+1} for certain
and drafts y'_{n+2..n+k+1}. Forward 2 is y_{n+1} with those drafts: it gives y_{n+2} for
certain and the verdicts, at most k+2 tokens in two forwards.
"""

from collections.abc import Sequence

from infer.tree import Tree


class AdaptiveDrafter:
    """Drafts by the model's own adaptive tokens."""

    def __init__(self, adaptive_ids: Sequence[int], k: int) -> None:
        """One id serves any k (identical tokens); of several (diverse) the first k are used.

        Raises ValueError for a k that is not positive or beyond the diverse ids.
        """
        if k < 1 or (len(adaptive_ids) > 1 and k > len(adaptive_ids)):
            wanted = "at least 1" if len(adaptive_ids) == 1 else f"1 to {len(adaptive_ids)}"
            raise ValueError(f"k: wanted {wanted} adaptive tokens, found {k}")
        self._probes = tuple(adaptive_ids[:k]) if len(adaptive_ids) > 1 else (adaptive_ids[0],) * k
        self._drafts: tuple[int, ...] = ()
        self.max_rows = 1 + k

    def begin(self) -> None:
        """Forget the drafts of the last prompt."""
        self._drafts = ()

    def propose(self, root: int) -> Tree:
        """The drafts at hand, or the probes that make new ones."""
        return Tree.chain(root, self._drafts) if self._drafts else Tree.chain(root, probes=self._probes)

    def observe(self, tree: Tree, path: Sequence[int], choices: Sequence[int]) -> None:
        """The choices after the probes are the next drafts; verified drafts are used up."""
        self._drafts = tuple(choices[tree.probes_from :])
