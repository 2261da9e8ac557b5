"""The previous-token head: corrects an adaptive token's logits by the token before it.

    h'_j = h_j + W2 silu( W1 [ĥ_j ; ê(t_{j-1})] )        x̂ = x / rms(x)

train/head.py describes and trains it. The hidden state of a place is known before the
token in front of the place is drafted. So the part of W1's product that depends on h_j is
computed once, and the rest for each drafted token. Only the logits of the place's
likeliest tokens are computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

#: The number of likeliest tokens of a place that get corrected logits.
CORRECTED = 16
#: Takes a place, the token before it, and ids; returns the logits of the ids at the place.
Correct = Callable[[int, int, Sequence[int]], list[float]]


class PreviousTokenHead(nn.Module):
    """The head's weights W1 (d, 2d) and W2 (d, d). It reads the embeddings of the model `lm`."""

    def __init__(self, lm: PreTrainedModel, w1: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.w1 = nn.Parameter(w1, requires_grad=False)
        self.w2 = nn.Parameter(w2, requires_grad=False)
        # A tuple, so that PyTorch does not register them as modules of the head.
        self._ends: Any = (lm.get_input_embeddings(), lm.get_output_embeddings())

    @property
    def width(self) -> int:
        """The hidden size d of the model."""
        return len(self.w2)

    @staticmethod
    def of(lm: nn.Module) -> "PreviousTokenHead | None":
        """Return the head of a model; None for a model without a head."""
        return getattr(lm, "previous_token_head", None)

    @torch.inference_mode()
    def correct(self, hidden_kd: Tensor) -> Correct:
        """Return a function that computes corrected logits from the hidden states of k places."""
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
