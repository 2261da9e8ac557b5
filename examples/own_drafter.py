"""Decode with your own drafter: here, propose the tokens that followed the last token before.

python -m examples.own_drafter smollm2 "def fib(n):"

The loop accepts a draft only if the model chooses the same token: a bad drafter costs time, but
cannot change the text.
"""

import sys
from collections.abc import Sequence

from conf.errors import UserError
from infer import load
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits, decode
from infer.requests import check_length
from infer.trees.tree import Tree

NEW = 64


class Repeat(Drafters):
    """Propose the tokens that followed the previous occurrence of the last token."""

    max_rows = 9  # rows of a tree: the last token and eight drafts

    def propose(
        self, contexts: Sequence[Sequence[int]], left: Sequence[int]
    ) -> list[Tree]:
        """Return a chain for each text, without drafts if its last token is new."""
        return [self._chain(list(text), most) for text, most in zip(contexts, left)]

    def _chain(self, text: list[int], left: int) -> Tree:
        last = text[-1]
        place = len(text) - 1 - text[-2::-1].index(last) if last in text[:-1] else None
        drafts = text[place : place + self.max_rows - 1] if place else []
        return Tree.chain(last, drafts[: left - 1])


def main(name: str, prompt: str) -> None:
    """Print the text and the number of accepted drafts."""
    model = load(name, "float32")
    ids = model.text.encode(prompt)
    check_length(ids, "prompt", new=NEW, context=model.context, setting="NEW")
    runner = Runner(model.lm, capacity=len(ids) + NEW, max_rows=Repeat.max_rows)
    forwards = decode(runner, [Request(ids)], Repeat(), Limits(NEW, model.eos))
    steps = [step for forward in forwards for step in forward]
    print(model.text.decode([token for step in steps for token in step.tokens]))
    print(sum(step.accepted for step in steps), "of", end=" ")
    print(sum(step.drafted for step in steps), "drafts accepted")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
