"""The decoding loop: one for every method. Plain decoding is this loop with zero drafts.

Knows the order of the verbs; what they do is the drafter's, the runner's and the pick's.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from infer.pick import greedy
from infer.runner import Runner
from infer.tree import Tree


class Drafter(Protocol):
    """What hangs a tree under the last emitted token."""

    max_rows: int  # nodes of its largest tree

    def begin(self) -> None:
        """A new prompt."""
        ...

    def propose(self, root: int) -> Tree:
        """The tree to verify next."""
        ...

    def observe(self, tree: Tree, path: Sequence[int], choices: Sequence[int]) -> None:
        """What came of it: the accepted path, and the model's choice after every node."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: what it emitted, how many nodes could be accepted, how many were."""

    tokens: list[int]
    drafted: int
    accepted: int


def decode(
    runner: Runner, drafter: Drafter, prompt: Sequence[int], *, max_new_tokens: int, eos: Collection[int]
) -> Iterator[Step]:
    """Greedy decoding of a prompt of at least one token, step by step.

    The tokens of all steps are exactly those of plain decoding: at most `max_new_tokens`,
    ending with the first id of `eos` that the model chooses.
    """
    runner.prefill(prompt[:-1])
    drafter.begin()
    root, left = prompt[-1], max_new_tokens
    while left > 0:
        tree = drafter.propose(root)
        choices = greedy(runner.forward(tree))
        path = tree.walk(choices)
        runner.commit(path)
        drafter.observe(tree, path, choices)
        tokens = [tree.tokens[node] for node in path[1:]] + [choices[path[-1]]]
        tokens = _until(tokens, eos)[:left]
        yield Step(tokens, tree.drafted, len(path) - 1)
        root, left = tokens[-1], left - len(tokens)
        if root in eos:
            return


def _until(tokens: list[int], eos: Collection[int]) -> list[int]:
    """The tokens up to and with the first that ends the text."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]
