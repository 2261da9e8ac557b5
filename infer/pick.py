"""From logits to one token per node: the only verifier.

A draft is accepted where it equals the pick, so the output is what the picks alone give.
"""

from torch import Tensor


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token after each of q nodes; logits (q, V)."""
    return logits.argmax(-1).tolist()
