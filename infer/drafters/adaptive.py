"""SDSAT: drafts by the model's own adaptive tokens (SDSAT §2.1).

k adaptive tokens as probes under y_n say what comes at n+2 .. n+k+1, while the model itself says
y_{n+1}. Where the probes hang is a policy:

- under the root alone, when there is nothing to verify: the paper's two forwards in turn (eq. 1-3),
  at most k + 2 tokens in two;
- under the drafts as well: the next draft is made while this one is verified, at most k + 1 tokens
  in each forward, whose rows are (k + 1) as many;
- under some of them: between.

The drafts are the same, whatever the policy, and so is the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from infer.drafters.outcome import Outcome, Watch
from infer.engine.reading import Candidates
from infer.trees.lattice import grow, lattice, nucleus_shape, nucleus_tree
from infer.trees.token_graph import Drafts
from infer.trees.tree import Tree


class Policy(Protocol):
    """How much is drafted, and where the probes hang."""

    @property
    def most(self) -> int:
        """Probes under a node, ever."""
        ...

    @property
    def max_rows(self) -> int:
        """Rows of the largest tree."""
        ...

    @property
    def width(self) -> int:
        """Candidates for each place."""
        ...

    def shape(self, root: int, candidates: Candidates | None, left: int) -> tuple[Drafts, Sequence[int], int]:
        """The drafts to verify, no deeper than `left` - 1, the nodes to probe, and the probes under each."""
        ...

    def learn(self, candidates: Candidates | None, tokens: Sequence[int], rows: int) -> None:
        """What a forward of so many rows emitted, and the candidates there were: one token more than
        were accepted.
        """
        ...


@dataclass(frozen=True)
class FixedPolicy:
    """Always the same: up to `nodes` drafts of `width` candidates for each of k places.

    `probes`: "root", after the paper; "all"; or the number of nodes, those likeliest to end the path.
    `tree`: "lattice", unrolled from the candidates' lattice by their weights, or "paper", the published shape.
    """

    k: int
    probes: str | int = "root"
    nodes: int | None = None  # k where not given
    width: int = 1
    tree: str = "lattice"

    @property
    def most(self) -> int:
        """Always the same."""
        return self.k

    @property
    def drafted(self) -> int:
        """Drafts in a tree, at most."""
        if self.tree == "paper":
            return len(nucleus_shape(self.k))
        return min(self.nodes or self.k, self.k if self.width == 1 else self.nodes or self.k)

    @property
    def max_rows(self) -> int:
        """Rows of the largest tree."""
        sites = {"root": 0, "all": 1 + self.drafted}.get(str(self.probes), self.probes)
        return max(1 + self.k, 1 + self.drafted + self.k * min(int(sites), 1 + self.drafted))

    def shape(self, root: int, candidates: Candidates | None, left: int) -> tuple[Drafts, Sequence[int], int]:
        """The likeliest paths. A lone root is always probed, since there is nothing else to do."""
        if candidates is None:
            return grow(root, (), (), ()), [0], self.k
        ids, weights = candidates.ids[: left - 1], candidates.weights
        if self.tree == "paper":
            drafts = nucleus_tree(root, ids, weights, self.k)
        else:
            drafts = grow(root, ids, weights, [0.0] * self.drafted)
        count = len(drafts.tokens)
        if self.probes == "root":
            return drafts, [0] if count == 1 else [], self.k
        sites = likeliest(drafts, count if self.probes == "all" else int(self.probes))
        return drafts, sorted(sites), self.k

    def learn(self, candidates: Candidates | None, tokens: Sequence[int], rows: int) -> None:
        """Nothing changes."""


def likeliest(drafts: Drafts, count: int) -> list[int]:
    """The nodes at which the accepted path most probably ends, in that order."""
    endings = drafts.endings()
    return sorted(range(len(endings)), key=endings.__getitem__, reverse=True)[:count]


def check_probes(adaptive_ids: Sequence[int], k: int) -> None:
    """Raises ValueError for a k that is not positive, or beyond the diverse ids."""
    if k < 1 or (len(adaptive_ids) > 1 and k > len(adaptive_ids)):
        wanted = "at least 1" if len(adaptive_ids) == 1 else f"1 to {len(adaptive_ids)}"
        raise ValueError(f"k: wanted {wanted} adaptive tokens, found {k}")


def probe_ids(adaptive_ids: Sequence[int], k: int) -> tuple[int, ...]:
    """One id serves any k (identical tokens); of several (diverse) the first k are used.

    Raises ValueError for a k that is not possible.
    """
    check_probes(adaptive_ids, k)
    return tuple(adaptive_ids[:k]) if len(adaptive_ids) > 1 else (adaptive_ids[0],) * k


class AdaptiveDrafter:
    """One sequence's drafts. The policy may serve several, and learns from all."""

    def __init__(self, adaptive_ids: Sequence[int], policy: Policy, watch: Watch | None = None) -> None:
        self._probes, self._policy, self._watch = probe_ids(adaptive_ids, policy.most), policy, watch
        self._candidates: Candidates | None = None
        self._drafts = grow(0, (), (), ())
        self.max_rows, self.width = policy.max_rows, policy.width

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """The drafts at hand, and probes for new ones as far as the text goes on."""
        drafts, sites, k = self._policy.shape(context[-1], self._candidates, left)
        self._drafts = drafts
        tree = Tree(tuple(drafts.tokens), tuple(drafts.parents), len(drafts.tokens))
        # Nothing is deeper than the last token that may be fed: no position beyond the text's end.
        k = min(k, left - 2)
        sites = [node for node in sites if drafts.depths[node] + k < left]
        return tree.probe(sites, self._probes[:k]) if k > 0 and sites else tree

    def observe(
        self, tree: Tree, path: Sequence[int], choice: int, drafts: Candidates | None, rows: int
    ) -> None:
        """The candidates behind the accepted path are the next drafts; verified ones are used up."""
        tokens = [*(tree.tokens[node] for node in path[1:]), choice]
        self._policy.learn(self._candidates, tokens, rows)
        if self._watch and self._candidates:
            graph = lattice(tree.tokens[0], self._candidates.ids, self._candidates.weights)
            self._watch(Outcome(graph, self._drafts, list(path), tokens))
        self._candidates = drafts
