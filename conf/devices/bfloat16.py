"""Products of weights in bfloat16 on a CPU by native.c, with sums in float32.

A row's sum has one order, whatever rows are beside it. So decoding with drafts is exact, also on CPUs
without instructions for bfloat16, which read half as many bytes as in float32.
"""

from functools import cache

import torch
from torch import Tensor

from conf.devices.int8 import Native
from conf.devices.native import library


class NativeBFloat16(Native):
    """A weight in bfloat16 that native.c multiplies by."""

    dtype = "bfloat16"
    columns = 2
    kept = torch.bfloat16

    @classmethod
    def round(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return a weight (d', d) in bfloat16, and a scale of one for each row (d',)."""
        return weight.to(torch.bfloat16), torch.ones(len(weight))

    @staticmethod
    def _factors(padded: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return ()


@cache
def bfloat16_kernel() -> type[NativeBFloat16] | None:
    """Return the kernel for weights in bfloat16; None without a C compiler or AVX2."""
    capable = torch.cpu.get_capabilities().get("avx2", False)
    return NativeBFloat16 if capable and library("bfloat16") else None
