"""The previous-token head with rounded weights as two calls of native.c.

The head reads 3 d² weights for the first token that it corrects and 2 d² for each further token.
In int8 they stay in the CPU's cache. The head is for drafts alone, so no sum needs to be exact.
"""

from collections.abc import Sequence
from ctypes import (
    Structure,
    byref,
    c_float,
    c_long,
    c_void_p,
)
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.devices.int8 import Kernel, Native, pack
from conf.devices.native import LANES, CMatrix
from infer.engine.head import Correct, PreviousTokenHead


class CHead(Structure):
    """`head` of native.c."""

    _fields_ = [
        ("d", c_long),
        *((name, CMatrix) for name in ("of_hidden", "of_token", "w2")),
        ("norm", c_void_p),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("output", "bias")),
    ]


class NativeHead(PreviousTokenHead):
    """The head of a model with rounded layers, by native.c."""

    def __init__(
        self,
        kernel: type[Native],
        lm: PreTrainedModel,
        head: PreviousTokenHead,
    ) -> None:
        super().__init__(lm, head.w1, head.w2)
        self._native = kernel.library()
        d = self.width
        matrices: list[Any] = [
            pack(w.float(), kernel) for w in (*head.w1.split(d, dim=1), head.w2)
        ]
        self._embedding, output = self._ends
        weight = output.weight.contiguous()
        norm = torch.full((d,), d**0.5)  # as RowNorm's weight and epsilon
        self._kept = matrices, weight, norm
        self._outputs: int = matrices[0].outputs
        self._c = CHead(
            *(d, *(matrix.matrix for matrix in matrices)),
            *(norm.data_ptr(), d * torch.finfo(torch.float32).eps),
            *(
                weight.data_ptr(),
                None if output.bias is None else output.bias.data_ptr(),
            ),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "NativeHead":
        """Return the head itself: it does not change, and pointers cannot be copied."""
        return self

    @torch.inference_mode()
    def correct(self, hidden_kd: Tensor) -> Correct:
        """See PreviousTokenHead."""
        hidden = hidden_kd.contiguous()
        k, _ = hidden.shape
        inner = hidden.new_empty(k, self._outputs)
        self._native.read_hidden(
            *(byref(self._c), k, hidden.data_ptr(), inner.data_ptr())
        )

        @torch.inference_mode()
        def logits(place: int, previous: int, ids: Sequence[int]) -> list[float]:
            count = len(ids)
            result = (c_float * count)()
            token = self._embedding.weight[previous].float()
            rows = hidden[place], inner[place], token
            self._native.correct(
                *(byref(self._c), *(row.data_ptr() for row in rows)),
                *(count, (c_long * count)(*ids), result),
            )
            return list(result)

        return logits


def rounded_head(
    lm: PreTrainedModel, head: PreviousTokenHead, kernel: type[Kernel]
) -> PreviousTokenHead:
    """Return the head of a model with layers rounded by `kernel`; `head` itself if native.c does not apply."""
    if not issubclass(kernel, Native) or head.width % LANES:
        return head
    return NativeHead(kernel, lm, head)
