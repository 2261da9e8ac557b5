"""What an engine with parallel drafting should make of a text, a forward of the whole text at a time."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel


class Drafted(NamedTuple):
    """Tokens, steps of drafting and verifying, and how many drafts were accepted."""

    tokens: list[int]
    steps: int
    accepted: int


@torch.inference_mode()
def best(lm: PreTrainedModel, ids: Sequence[int], last: int = 1) -> list[int]:
    """The likeliest token behind each of the last so many ids."""
    return (
        lm(torch.tensor([ids], device=lm.device)).logits[0, -last:].argmax(-1).tolist()
    )


def drafted(
    lm: PreTrainedModel,
    prompt: Sequence[int],
    *,
    mask: int,
    K: int,
    new: int,
    ends: Collection[int] = (),
) -> Drafted:
    """Greedy, to the first of `ends` or `new` tokens; each step drafts K tokens by K - 1 masks and verifies
    them. Drafts of the last step may lie behind the text's end.

        prompt y1 | m  m  m       says d1 d2 d3 d4, the first of which is the model's own next token
        prompt y1 | d1 d2 d3 d4   those that the model says itself are accepted, and one more token is its own
    """
    text = list[int]()
    for _ in range(new + K):
        text += best(lm, [*prompt, *text])
    stop = next((n for n, token in enumerate(text[:new], 1) if token in ends), new)
    done, steps, accepted = 1, 0, 0
    while done < stop:
        drafts = best(lm, [*prompt, *text[:done], *[mask] * (K - 1)], K)
        right = next(
            (n for n, draft in enumerate(drafts) if draft != text[done + n]), K
        )
        steps, accepted, done = steps + 1, accepted + right, done + right + 1
    return Drafted(text[:stop], steps, accepted)
