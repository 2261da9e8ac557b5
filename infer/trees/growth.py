"""How a draft model's graph grows, level by level (GSD §4.2, §5.2, §5.3). Pure.

The frontier is the set of nodes that get children next. The children of a frontier node
are the draft model's k likeliest tokens. A token is dropped if its probability is below
θ_sib times the probability of the likeliest sibling: it is neither drafted nor verified. A
remaining child

- is a leaf if its probability is below θ_prob;
- is merged into the first node that ended the same τ-gram, if that node is not on the
  child's own paths: both nodes then share their continuations;
- otherwise joins the next frontier.

With k=1 the graph is a sequence (SSD), without merging it is a tree (TSD), otherwise it is
GSD's graph. A node's own paths are all paths that reach it, also through merged nodes, so a
merge never closes a cycle. If two nodes end the same (τ+1)-gram, their parents end the same
τ-gram and were not merged. So one parent is on the other's path: the text repeats itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from infer.trees.token_graph import TokenGraph


@dataclass(frozen=True)
class Rules:
    """The settings of the graph, by default the paper's (Appendix A).

    `tau` counts the merged node's own token, as §5.2 of the paper does. The paper's tables do
    not count it: 2 in a table is 3 here (docs/papers.md). None disables merging.
    """

    k: int = 4
    depth: int = 10
    theta_prob: float = 0.2
    theta_sib: float = 0.3
    tau: int | None = 3


class Growth:
    """A graph and its frontier, the nodes that get children next.

    At most `most` nodes get children, in all levels together: each is a row of the draft
    model. The likeliest nodes are chosen. `calibrated` maps the draft model's probability to
    the observed acceptance rate of such drafts.

    With `draws` the candidates are draws for verification by ratio (pick.py). Dropping a
    draw, or merging into a node with known children, would change the distribution of the
    text. So a node that θ_sib would drop becomes a leaf, and a node is merged only into a
    node of its own level, which has no children yet.
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
        # For each inner node: the joint probability of its path, the path's last τ tokens,
        # and a bit mask of the nodes on all paths to it, including itself.
        self._joint = {0: 1.0}
        self._grams: dict[int, tuple[int, ...]] = {0: (root,)}
        self._above = {0: 1}
        # The nodes that end each τ-gram.
        self._ended: dict[tuple[int, ...], list[int]] = {}

    @property
    def reach(self) -> float:
        """The probability that the text continues through the frontier, without merged nodes."""
        return sum(map(self._joint.__getitem__, self.frontier))

    def grow(
        self, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> None:
        """Add a level of up to k candidates for each frontier node.

        Candidates are in order of decreasing probability, or in the order of the draws.
        """
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
        # The descendants of `into` now follow this node too. Only nodes that will get
        # children are updated: no other node is looked up again.
        for other in chain(parents, self.frontier):
            if self._above[other] >> into & 1:
                self._above[other] |= above
        return True
