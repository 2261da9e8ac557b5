"""The slow reference of growth.py and token_graph.py: GSD §4 and §5, word for word.

Every node asks the draft model with its whole path, looks through all nodes for its τ-gram, and walks
the graph to see whether a merge would close a circle.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Model = Callable[
    [tuple[int, ...]], Sequence[tuple[int, float]]
]  # a path's likeliest next tokens, chances


@dataclass(eq=False)
class Node:
    token: int
    parent: "Node | None"
    chance: float = 1.0
    pruned: bool = False
    into: "Node | None" = None  # merged
    children: list["Node"] = field(default_factory=list)

    @property
    def path(self) -> tuple[int, ...]:
        return (*(self.parent.path if self.parent else ()), self.token)

    @property
    def successors(self) -> list["Node"]:
        return self.into.children if self.into else self.children

    def reaches(self, other: "Node") -> bool:
        """Return True if a path leads to `other`, along children or through a merged node."""
        onward = [self.into] if self.into else self.children
        return self is other or any(node.reaches(other) for node in onward)


def draw(
    root: int,
    model: Model,
    *,
    k: int,
    depth: int,
    theta_prob: float,
    theta_sib: float,
    tau: int | None,
) -> list[Node]:
    """Return all nodes in the order of drafting."""
    nodes = [Node(root, None)]
    level = [nodes[0]]
    for _ in range(depth):
        below = []
        for node in level:
            likeliest = list(model(node.path))[:k]
            best = max(chance for _, chance in likeliest)
            for token, chance in likeliest:
                if (
                    chance < theta_sib * best
                ):  # sibling pruning as in the authors' code: it is no draft
                    continue
                child = Node(token, node, chance)
                node.children.append(child)
                nodes.append(child)
                child.pruned = chance < theta_prob  # §4.2, probability pruning: a leaf
                if child.pruned:
                    continue
                if tau:
                    child.into = first_occurrence(child, nodes, tau)
                if child.into is None:
                    below.append(child)
        level = below
    return nodes


def first_occurrence(node: Node, nodes: Sequence[Node], tau: int) -> Node | None:
    """Return the first node that ends the same τ-gram outside of the node's own paths (§5.2, §5.3)."""
    gram = node.path[-tau:]
    for other in nodes:
        explored = other is not node and not other.pruned and other.into is None
        same = len(other.path) >= tau and other.path[-tau:] == gram
        if explored and same and not other.reaches(node):
            return other
    return None


def hypotheses(
    node: Node, depth: int, chance: float = 1.0
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Return every path below a node of the unmerged tree, down to a depth, with its probability (§5.4)."""
    for child in node.successors if depth else ():
        yield (child.token,), chance * child.chance
        for path, joint in hypotheses(child, depth - 1, chance * child.chance):
            yield (child.token, *path), joint


def likeliest_after(
    model: Model, text: tuple[int, ...], path: tuple[int, ...]
) -> Sequence[tuple[int, float]]:
    return model((*text, *path))


@dataclass
class Step:
    """A draft and its verification."""

    drafted: list[Node]  # all nodes but the root
    accepted: list[Node]
    tokens: list[int]

    @property
    def counts(self) -> dict[str, int]:
        """Return the counts of the paper's tables."""
        return {
            "drafted": sum(node.into is None for node in self.drafted),
            "levels": max((len(node.path) - 1 for node in self.drafted), default=0),
            "accepted": len(self.accepted),
            "successes": any(node.into for node in self.accepted[:-1]),
        }


def decode(
    text: Sequence[int],
    target: Callable[[tuple[int, ...]], int],
    model: Model,
    *,
    new: int,
    ends: Collection[int],
    nodes: int,
    depth: int,
    **rules: Any,
) -> list[Step]:
    """Decode as in §3 to §5: draw a graph, verify its likeliest paths, accept while the target agrees."""
    written = tuple(text)
    steps: list[Step] = []
    while len(written) < len(text) + new and (not steps or written[-1] not in ends):
        left = len(text) + new - len(written)
        # The last token is the target's own. Merging makes paths longer than the levels.
        below = min(depth, left - 1)
        behind = partial(likeliest_after, model, written[:-1])
        graph = draw(written[-1], behind, depth=below, **rules)
        paths = sorted(hypotheses(graph[0], left - 1), key=lambda pair: -pair[1])[
            :nodes
        ]
        verified = {path for path, _ in paths}
        step = Step(graph[1:], [], [])
        steps.append(step)
        at = graph[0]
        while True:
            token = target((*written, *step.tokens))
            step.tokens.append(token)
            drafted = [child for child in at.successors if child.token == token]
            if not drafted or tuple(step.tokens) not in verified:
                break
            at = drafted[0]
            step.accepted.append(at)
            if token in ends:
                break
        written = (*written, *step.tokens)
    return steps
