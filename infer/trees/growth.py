"""How a draft model's graph grows, level by level (GSD §4.2, §5.2, §5.3). Pure.

The children of a frontier node are the draft model's k likeliest tokens. Tokens whose
chance is below θ_sib times the likeliest sibling's are dropped, neither drafted nor
verified. A remaining child

- is a leaf if its chance is below θ_prob;
- is merged into the node that first ended the same τ-gram, if there is one outside of
  the child's own paths: both then share their continuations;
- otherwise joins the next frontier.

With k=1 the graph is a sequence (SSD), without merging a tree (TSD), in general GSD. A
node's own paths are all paths that reach it, also through merged nodes, so a merge
never closes a cycle. If a (τ+1)-gram ends at two nodes, the τ-grams before it lie on
one path: the text repeats itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from infer.trees.token_graph import TokenGraph


@dataclass(frozen=True)
class Rules:
    """The paper's settings (Appendix A); `tau` None disables merging.

    `tau` counts the merged node's own token, as the paper's text does (5.2). Its tables do
    not: their 2 is 3 here (docs/papers.md).
    """

    k: int = 4
    depth: int = 10
    theta_prob: float = 0.2
    theta_sib: float = 0.3
    tau: int | None = 3


class Growth:
    """A graph and its frontier, the nodes that get children next.

    `most` bounds the nodes that ever get children, the draft model's rows; the likeliest
    are chosen. With `draws` the candidates are draws for verification by ratio (pick.py).
    Dropping a draw, or merging into a node whose children are known, would change the
    text's distribution. So a node that θ_sib would drop becomes a leaf, and nodes are
    merged only into nodes of their own level, which have no children yet. `calibrated`
    maps the draft model's chance to the rate at which such drafts were right.
    """

    def __init__(
        self,
        root: int,
        rules: Rules,
        *,
        most: int,
        draws: bool = False,
        calibrated: Callable[[float], float] = float,
    ) -> None:
        self.graph = TokenGraph([root])
        self.frontier = [0]
        self._rules = rules
        self._left = most - 1
        self._draws = draws
        self._calibrated = calibrated
        # For each inner node: the joint chance of its path, the path's last τ tokens,
        # and a bit for every node on the paths to it, itself included.
        self._joint = {0: 1.0}
        self._grams: dict[int, tuple[int, ...]] = {0: (root,)}
        self._above = {0: 1}
        # Nodes by the τ-gram that they end.
        self._ended: dict[tuple[int, ...], list[int]] = {}

    @property
    def reach(self) -> float:
        """The chance that the text continues through the frontier, without merged nodes."""
        return sum(map(self._joint.__getitem__, self.frontier))

    def grow(
        self, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> None:
        """Add a level: up to k candidates for each frontier node, by chance or as drawn."""
        rules = self._rules
        parents = self.frontier
        self.frontier = []
        if self._draws:
            self._ended.clear()
        for parent, tokens, odds in zip(parents, ids, chances):
            least_of_siblings = rules.theta_sib * max(odds)
            least = max(rules.theta_prob, least_of_siblings)
            for token, chance in zip(tokens[: rules.k], odds):
                if chance < least_of_siblings and not self._draws:
                    continue
                node = self.graph.add(parent, token, chance)
                if chance >= least and not self._merge(node, parents):
                    self._joint[node] = self._joint[parent] * self._calibrated(chance)
                    self.frontier.append(node)
        if len(self.frontier) > self._left:
            likeliest = sorted(self.frontier, key=self._joint.__getitem__, reverse=True)
            self.frontier = sorted(likeliest[: self._left])
        self._left -= len(self.frontier)

    def _merge(self, node: int, parents: Sequence[int]) -> bool:
        """Merge a node if an earlier one ended its τ-gram; otherwise register it."""
        tau = self._rules.tau
        parent = self.graph.parents[node]
        if not tau:
            return False
        gram = (*self._grams[parent], self.graph.tokens[node])[-tau:]
        above = self._above[parent] | 1 << node
        ended = self._ended.setdefault(gram, []) if len(gram) == tau else []
        into = next((other for other in ended if not above >> other & 1), None)
        if into is None:
            ended.append(node)
            self._grams[node] = gram
            self._above[node] = above
            return False
        self.graph.merge(node, into)
        # The other node's descendants now follow this one too. Only nodes that get
        # children are looked up again.
        for other in chain(parents, self.frontier):
            if self._above[other] >> into & 1:
                self._above[other] |= above
        return True
