"""The previous-token head: a draft that knows the token drafted before it.

An adaptive token predicts its place blindly: the tokens between it and the text are not
known yet. When they are drafted one after the other, the one before a place is. With h_j
the last hidden state of the j-th adaptive token and e(t) the model's embedding of the
token before the place that it predicts (Apple's sampler head, arXiv 2507.11851),

    h'_j = h_j + W2 silu( W1 [ĥ_j ; ê(t_{j-1})] )        x̂ = x / rms(x)

goes through the model's own head. W2 begins at zero. The inputs are normalised, because
embeddings and hidden states of a model differ in scale by its own choice.
infer/engine/head.py computes the same in decoding.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from conf.errors import UserError
from train.checkpoint import write_safetensors

FILE = "head.safetensors"  # beside an adapter
NAME = "head."  # of the head within train.model.AdaptiveLM


class PreviousTokenHead(nn.Module):
    """W1 (d, 2d) and W2 (d, d), random and zero."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = nn.Linear(2 * width, width, bias=False, dtype=dtype)
        self.w2 = nn.Linear(width, width, bias=False, dtype=dtype)
        nn.init.zeros_(self.w2.weight)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return h' of hidden states and embeddings of tokens, all (..., d)."""
        width = hidden.shape[-1:]
        inputs = [F.rms_norm(hidden, width), F.rms_norm(previous, width)]
        corrected: Tensor = hidden + self.w2(F.silu(self.w1(torch.cat(inputs, -1))))
        return corrected


def write_head(weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Write the head among a checkpoint's weights, if there is one, into a folder."""
    head = {
        name.removeprefix(NAME): weights[name].to(dtype)
        for name in weights
        if name.startswith(NAME)
    }
    if head:
        write_safetensors(head, folder / FILE)


def read_head(head: PreviousTokenHead | None, folder: Path) -> None:
    """Give a head the weights that `write_head` wrote into an adapter's folder, if any.

    Raises UserError if no head is trained, though the folder has one, or if it is of
    another width.
    """
    path = folder / FILE
    if not path.is_file():
        return
    if head is None:
        raise UserError(
            f"objective.previous_token must be true with model.adapter={folder}, which "
            "has a previous-token head, got false."
        )
    weights = load_file(path)
    shapes = {name: weight.shape for name, weight in weights.items()}
    expected = {name: weight.shape for name, weight in head.state_dict().items()}
    if shapes != expected:
        raise UserError(
            f"model.adapter={folder} must have a head of this model's width "
            f"{head.w2.out_features}, got another one in {FILE}."
        )
    head.load_state_dict(weights)
