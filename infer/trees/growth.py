"""How a draft model's graph grows, level by level (GSD §4.2, §5.2, §5.3). Pure.

Every node of the frontier gets the draft model's k likeliest tokens as children, without those whose chance
is below θ_sib times their likeliest sibling's: these are not drafted, so that they are not verified either. Of
the others

- one whose chance is below θ_prob is a leaf;
- one that ends a τ-gram which stands in the graph already, outside of its own paths, is merged into the
  node that ended it first: what follows there follows here;
- the rest are the next frontier.

Out-degree k=1 is a sequence (SSD), no merging a tree (TSD), both together GSD. A node's own paths are
all on which it can be reached, through merged nodes too. So a merge never closes a circle, and
where a (τ+1)-gram stands at two nodes, the τ-grams before it lie on one path: a text that repeats itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from infer.trees.token_graph import TokenGraph


@dataclass(frozen=True)
class Rules:
    """The paper's settings (Appendix A). `tau` None: nothing is merged."""

    k: int = 4
    depth: int = 10
    theta_prob: float = 0.2
    theta_sib: float = 0.3
    tau: int | None = 2


class Growth:
    """A graph, and its nodes that get children next.

    `most` bounds the nodes that ever get children: the draft model's rows. Beyond it the likeliest do.
    `draws`: the candidates are draws for verification by ratio (pick.py), where dropping some of them, or
    merging into a node whose children are known, would change the text's distribution. So a node that θ_sib
    would drop is a leaf, and nodes are merged only into those of their own level, which have no children yet.
    `calibrated` makes of the draft model's chance how often such drafts were right.
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
        # Of nodes that are no leaves: the chance of the path from the root, its last τ tokens, and all nodes
        # on the paths to them, themselves among them, as bits.
        self._joint = {0: 1.0}
        self._grams: dict[int, tuple[int, ...]] = {0: (root,)}
        self._above = {0: 1}
        self._ended: dict[
            tuple[int, ...], list[int]
        ] = {}  # nodes by the τ-gram that they end

    @property
    def reach(self) -> float:
        """The chance that the text goes on through the frontier, merged nodes not counted."""
        return sum(map(self._joint.__getitem__, self.frontier))

    def grow(
        self, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> None:
        """Grow a level: at most k candidates behind each node of the frontier, likeliest first or as drawn."""
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
        """Merge a node that is τ-redundant; else its own τ-gram stands in the graph from now on."""
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
        # What stands behind the other is behind this one too. Nobody asks again but those that get children.
        for other in chain(parents, self.frontier):
            if self._above[other] >> into & 1:
                self._above[other] |= above
        return True
