"""Products of unsigned inputs and signed weights on a CPU, with exact sums of integers.

    OneDNN   CPUs with VNNI instructions, which add products in 32 bits
    Fbgemm   other x86 CPUs, which add pairs of products in 16 bits: inputs to 255 and weights
             to 64 do not overflow, since 2 x 255 x 64 < 2^15

A kernel rounds each row of its input to 127 levels on each side of zero, with a scale for each row.
"""

import warnings
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

INPUT_LEVELS = 127  # largest absolute value of a rounded input
ZERO_POINT = INPUT_LEVELS + 1  # added to the rounded inputs, which are unsigned
TINY = 1e-30  # the smallest scale, for an output row of zeros
# Tensors, because PyTorch would convert a Python number at each use.
_LEVELS = torch.tensor(float(INPUT_LEVELS))
_OFFSET = torch.tensor(ZERO_POINT + 0.5)


class OneDNN:
    """A weight that oneDNN multiplies by, with 127 levels on each side of zero."""

    levels = 127

    def __init__(self, weight: Tensor) -> None:
        """Round and pack a float32 weight (d', d)."""
        rounded, scale = round_weight(weight, self.levels)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scale = scale / INPUT_LEVELS
        self._zeros = torch.zeros(len(scale), dtype=torch.int32)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product (..., d') of the rounded x (..., d) and the rounded weight."""
        largest = x.abs().amax(-1, keepdim=True)
        # The numbers are positive, so adding a half and truncating rounds them.
        rounded = (x * (_LEVELS / largest)).add_(_OFFSET).to(torch.uint8)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rounded, 1.0, ZERO_POINT),
            *(self._packed, self._scale, self._zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return y.mul_(largest)


class Fbgemm:
    """A weight that FBGEMM multiplies by, with 64 levels on each side of zero."""

    levels = 64

    def __init__(self, weight: Tensor) -> None:
        """Round and pack a float32 weight (d', d)."""
        rounded, scale = round_weight(weight, self.levels)
        zeros = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():  # PyTorch will replace its quantized tensors
            warnings.simplefilter("ignore")
            quantized = torch._make_per_channel_quantized_tensor(
                rounded, (scale / INPUT_LEVELS).double(), zeros, 0
            )
        engine = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = engine

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product (..., d') of the rounded x (..., d) and the rounded weight."""
        largest = x.abs().amax(-1, keepdim=True)
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x * (_LEVELS / largest), 1.0, ZERO_POINT, self._packed
        )
        return y.mul_(largest)


def round_weight(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return a weight (d', d) in int8, from -levels to levels, and the scale of each row (d',)."""
    scale = weight.abs().amax(1).clamp_(min=TINY) / levels
    return (weight / scale[:, None]).round_().to(torch.int8), scale


Kernel: TypeAlias = OneDNN | Fbgemm


@cache
def exact_kernel() -> type[Kernel] | None:
    """Return the first kernel with exact sums on this CPU; None without one.

    Each kernel is compared with 64-bit integer products, extreme values included.
    """
    # On other CPUs both libraries compute in plain loops, slower than float32.
    if not torch.cpu.get_capabilities().get("avx2", False):
        return None
    kernels: list[type[Kernel]] = []
    if torch.backends.mkldnn.is_available():
        kernels.append(OneDNN)
    if "fbgemm" in torch.backends.quantized.supported_engines:
        kernels.append(Fbgemm)
    for kernel in kernels:
        if all(is_exact(kernel, rows) for rows in (1, 5, 16)):
            return kernel
    return None


def is_exact(kernel: type[Kernel], rows: int) -> bool:
    """Return whether the product of `rows` rows of integers is the 64-bit integer product."""
    generator = torch.Generator().manual_seed(0)

    def integers(n: int, most: int) -> Tensor:
        values = torch.randint(-most, most + 1, (n, 576), generator=generator)
        values[:, 0] = most  # so that no row is scaled
        return values

    x, weight = integers(rows, INPUT_LEVELS), integers(96, kernel.levels)
    x[0] = INPUT_LEVELS  # the largest sums
    weight[0], weight[1, 1:] = kernel.levels, -kernel.levels
    product = kernel(weight.float())(x.float())
    return bool((product.double().round() == (x @ weight.T).double()).all())
