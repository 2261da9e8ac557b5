"""The previous-token head: corrects an adaptive token's answer by the token before it.

    h'_j = h_j + W2 silu( W1 [ĥ_j ; ê(t_{j-1})] )        x̂ = x / rms(x)

train/head.py describes and trains it. A place's answer is known before the token in
front of it is drafted, so h_j's part of W1's product is computed once, and the rest for
each token that a draft tries. Only the logits of the place's likeliest tokens are
computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

#: Likeliest tokens of a place that are scored again.
CORRECTED = 16
#: A function of a place, the token before it, and ids: the ids' logits there.
Correct = Callable[[int, int, Sequence[int]], list[float]]


class PreviousTokenHead(nn.Module):
    """W1 (d, 2d) and W2 (d, d) beside a model `lm`, whose embeddings it reads."""

    def __init__(self, lm: PreTrainedModel, w1: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.w1 = nn.Parameter(w1, requires_grad=False)
        self.w2 = nn.Parameter(w2, requires_grad=False)
        # In a tuple: they are modules of `lm`, not of the head.
        self._ends: Any = (lm.get_input_embeddings(), lm.get_output_embeddings())

    @property
    def width(self) -> int:
        """The model's width d."""
        return len(self.w2)

    @staticmethod
    def of(lm: nn.Module) -> "PreviousTokenHead | None":
        """Return the head of a model, if it has one."""
        return getattr(lm, "previous_token_head", None)

    @torch.inference_mode()
    def correct(self, hidden_kd: Tensor) -> Correct:
        """Return the corrected logits of places with these hidden states."""
        embedding, output = self._ends
        d = hidden_kd.shape[-1:]
        of_hidden, of_token = self.w1.split(d[0], dim=1)
        inner_kd = F.linear(F.rms_norm(hidden_kd, d), of_hidden)

        @torch.inference_mode()
        def logits(place: int, previous: int, ids: Sequence[int]) -> list[float]:
            device = hidden_kd.device
            token = embedding(torch.tensor([previous], device=device))[0]
            inner = inner_kd[place] + F.linear(F.rms_norm(token, d), of_token)
            corrected = hidden_kd[place] + F.linear(F.silu(inner), self.w2)
            rows = torch.tensor(ids, device=device)
            bias = None if output.bias is None else output.bias[rows]
            result: list[float] = F.linear(
                corrected, output.weight[rows], bias
            ).tolist()
            return result

        return logits
