"""How often the hypotheses of a tree say the same (GSD §5.1, Figure 3).

An n-gram is n drafts, each behind the one before it. It recurs where it stands in another branch too,
neither above nor below: what repeats itself along one path is no other hypothesis.

    y - a - b - c        n = 1: a, b, c in both branches, not d: 6 of 7 tokens
      ` d - a - b - c    n = 2: a b and b c: 6 of 7
                         n = 4: none
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from infer.benchmarks.prompts import TokenPrompt
from infer.study.bench import Bench
from infer.trees.token_graph import TokenGraph

LENGTHS = (1, 2, 3, 4, 5)


def measure_recurrence(bench: Bench) -> list[dict[str, Any]]:
    """By n, over the trees of all prompts: TSD's by the paper's settings."""
    decode = bench.decode("tsd")

    def counts(prompt: TokenPrompt) -> list[tuple[int, dict[int, int]]]:
        """The tokens of each tree, and by n those that recur."""
        graphs = [outcome.graph for outcome in bench.outcomes(decode, prompt)]
        return [(len(one.tokens) - 1, {n: len(recurring(one, n)) for n in LENGTHS}) for one in graphs]

    trees = list(chain.from_iterable(bench.each(counts)))
    tokens = sum(size for size, _ in trees)
    recur = {n: sum(by_length[n] for _, by_length in trees) for n in LENGTHS}
    return [
        {"n": n, "share": recur[n] / tokens if tokens else None, "tokens": tokens, "trees": len(trees)}
        for n in LENGTHS
    ]


def recurring(tree: TokenGraph, n: int) -> set[int]:
    """The nodes that are part of an n-gram which stands in another branch too; `tree` has no merged nodes."""
    paths = {node: _ending(tree, node, n) for node in range(1, len(tree.tokens))}
    grams = {end: tuple(tree.tokens[node] for node in path) for end, path in paths.items() if path}
    count, own = Counter(grams.values()), Counter(grams.keys())  # own: those of its path, above and below
    for end, gram in grams.items():
        for above in islice(_upwards(tree, end), 1, None):
            if grams.get(above) == gram:
                own[end] += 1
                own[above] += 1
    return {node for end, gram in grams.items() if count[gram] > own[end] for node in paths[end]}


def _ending(tree: TokenGraph, node: int, n: int) -> list[int]:
    """The n nodes of the path that ends there; none where it is shorter."""
    found = list(islice(_upwards(tree, node), n))
    return found if len(found) == n else []


def _upwards(tree: TokenGraph, node: int) -> Iterator[int]:
    """A node and those above it, but for the root."""
    while node > 0:
        yield node
        node = tree.parents[node]
