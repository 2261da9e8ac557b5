"""Products of unsigned inputs and signed weights on a CPU, with exact sums of integers.

    x86 CPU                                          with a C compiler   without
    with VNNI instructions: sums in 32 bits          Native              OneDNN
    without: sums of two or four columns in 16 bits  NativeGroups        Fbgemm

With inputs to 255, sixteen bits suffice if the weights of the same sign in a group of columns add
up to 128 at most: 255 x 128 < 2^15. `Groups` rounds each row of a weight so.
"""

import warnings
from abc import ABC, abstractmethod
from ctypes import CDLL, byref
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from conf.devices.native import CMatrix, library, warn_without_library

MOST = 127  # largest absolute value of a rounded input or weight
ZERO_POINT = MOST + 1  # added to the rounded inputs, which are unsigned
LARGEST_SUM = 128  # of the absolute weights of the same sign in a group
TRIED = (*range(48, 124, 4), 127)  # numbers of levels
TINY = 1e-30  # the smallest scale, for an output row of zeros
ROWS = 16  # of a weight in a block of native.c
#: Threads share operations of more multiplications, here and in the decoder of native.c.
DIVIDED = 2**18
FBGEMM_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"
BLOCK = 2**14  # rows of a weight that are rounded at once
# Tensors, because PyTorch would convert a Python number at each use.
_MOST = torch.tensor(float(MOST))
_OFFSET = torch.tensor(ZERO_POINT + 0.5)


class Kernel(ABC):
    """A rounded weight (d', d) that inputs are multiplied by."""

    #: The type of the rounded weight, as a value of the setting `dtype`.
    dtype = "int8"

    @abstractmethod
    def __init__(self, rounded: Tensor, scale: Tensor) -> None:
        """Pack a weight (d', d) in int8 with a scale for each row (d',)."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the product (..., d') of x (..., d), rounded with a scale for each row."""

    @classmethod
    def round(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return a float32 weight (d', d) in int8, and the scale of each row (d',)."""
        largest = weight.abs().amax(1).clamp_(min=TINY)
        scale = largest / cls.levels(weight, largest)
        rounded = (weight / scale[:, None]).round_().to(torch.int8)
        return cls.limit(rounded), scale

    @classmethod
    def levels(cls, weight: Tensor, largest: Tensor) -> Tensor:
        """Return the number of levels on each side of zero for each row of a weight (d',)."""
        return largest.new_full((len(weight),), MOST)

    @classmethod
    def limit(cls, rounded: Tensor) -> Tensor:
        """Return a weight in int8 without sums that would overflow; by default, the weight itself."""
        return rounded


class LibraryKernel(Kernel):
    """A rounded weight that a library of PyTorch multiplies by."""

    #: Whether `multiply` takes rounded inputs: in unsigned 8 bits, ZERO_POINT added.
    rounded: bool

    def __call__(self, x: Tensor) -> Tensor:
        """See Kernel."""
        largest = x.abs().amax(-1, keepdim=True)
        scaled = x * (_MOST / largest)
        if self.rounded:
            # The numbers are positive, so adding a half and truncating rounds them.
            scaled = scaled.add_(_OFFSET).to(torch.uint8)
        return self.multiply(scaled).mul_(largest)

    @abstractmethod
    def multiply(self, scaled: Tensor) -> Tensor:
        """Return the product of inputs from -MOST to MOST in float32, or `rounded`, divided by MOST."""


class OneDNN(LibraryKernel):
    """A rounded weight that oneDNN multiplies by."""

    rounded = True

    def __init__(self, rounded: Tensor, scale: Tensor) -> None:
        """See Kernel."""
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scale = scale / MOST
        self._zeros = torch.zeros(len(scale), dtype=torch.int32)

    def multiply(self, scaled: Tensor) -> Tensor:
        """See Kernel."""
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(scaled, 1.0, ZERO_POINT),
            *(self._packed, self._scale, self._zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return y


class Groups(Kernel):
    """A rounded weight. The products of a group of columns are added in 16 bits."""

    #: Columns in a group: two neighbours, or two of four columns and two of the next four.
    size: int

    @classmethod
    def levels(cls, weight: Tensor, largest: Tensor) -> Tensor:
        """Return the number of levels on each side of zero for each row of a weight (d',).

        It is the number with the smallest squared error: more levels are finer, but then `limit`
        changes more groups. A rounding changes a number by 1/12 squared steps on average.
        """
        groups = cls._groups(weight / largest[:, None])
        steps = weight.shape[1] / 12
        errors = [largest.new_full((len(weight),), steps / n**2) for n in TRIED]
        for sign in (1, -1):
            part = (sign * groups).clamp_(min=0)
            # Only a few groups are changed by `limit`, even with the most levels.
            row, group = (part.sum(0) > LARGEST_SUM / max(TRIED)).nonzero(as_tuple=True)
            weights = part[:, row, group]
            sums, squares = weights.sum(0), weights.square().sum(0)
            for levels, error in zip(TRIED, errors):
                lost = (1 - LARGEST_SUM / levels / sums).clamp_(min=0)  # of each weight
                error.index_add_(0, row, lost.square_() * squares)
        best: Tensor = largest.new_tensor(TRIED)[torch.stack(errors).argmin(0)]
        return best

    @classmethod
    def limit(cls, rounded: Tensor) -> Tensor:
        """Reduce the weights of a group with too large a sum by one factor for each sign."""
        groups = cls._groups(rounded).short()
        limited = torch.zeros_like(groups)
        for sign in (1, -1):
            part = (sign * groups).clamp_(min=0)
            sums = part.sum(0, dtype=torch.short).clamp_(min=LARGEST_SUM)
            limited += sign * (part * LARGEST_SUM // sums)
        fours = limited.to(torch.int8).unflatten(2, (-1, 2)).unflatten(0, (-1, 2))
        columns: Tensor = fours.permute(2, 3, 0, 4, 1).flatten(1)
        return columns[:, : rounded.shape[1]].contiguous()

    @classmethod
    def _groups(cls, weight: Tensor) -> Tensor:
        """Return the columns by their index in a group (size, d', groups), with zeros after the last."""
        columns = pad(weight, (0, -weight.shape[1] % (2 * cls.size)))
        fours = columns.view(len(weight), -1, cls.size // 2, 2, 2)
        return fours.permute(2, 4, 0, 1, 3).flatten(3).flatten(0, 1)


class Native(Kernel):
    """A rounded weight that native.c multiplies by.

    `matrix` is its C structure; `inputs` and `outputs` are the numbers of columns and rows with
    their padding.
    """

    columns = 4  # of a row of a weight in four bytes
    #: The type of an output head's own weight.
    kept = torch.float32

    def __init__(self, rounded: Tensor, scale: Tensor) -> None:
        """See Kernel."""
        self._rows, d = rounded.shape
        native = self.library()
        self._apply = native.apply
        padded = pad(rounded, (0, -d % self.columns, 0, -self._rows % ROWS))
        self.outputs, self.inputs = padded.shape
        blocks = padded.view(-1, ROWS, self.inputs // self.columns, self.columns)
        self._parts = (
            blocks.transpose(1, 2).contiguous(),
            *self._factors(padded, pad(scale, (0, -self._rows % ROWS))),
        )
        self.matrix = self.first_rows(self.outputs)

    def first_rows(self, count: int) -> CMatrix:
        """Return the C structure of the first `count` rows, and of up to ROWS - 1 rows after them."""
        addresses = (part.data_ptr() for part in self._parts)
        size = ROWS * self.inputs * self._parts[0].itemsize
        return CMatrix(self.inputs, -(-count // ROWS) * ROWS, size, *addresses)

    @classmethod
    def library(cls) -> CDLL:
        """Return native.c for this type of weights."""
        native = library(cls.dtype)
        assert native is not None
        return native

    @staticmethod
    def _factors(padded: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Return the factors of the products, and the numbers that are subtracted from them before."""
        return scale / MOST, ZERO_POINT * padded.sum(1, dtype=torch.int32)

    def __call__(self, x: Tensor) -> Tensor:
        """See Kernel."""
        x = x.float().contiguous()
        y = torch.empty((*x.shape[:-1], self.outputs))
        n = y.numel() // self.outputs
        work = n * self.inputs * self.outputs
        threads = torch.get_num_threads() if work >= DIVIDED else 1
        self._apply(
            *(byref(self.matrix), n, x.shape[-1], x.data_ptr(), y.data_ptr(), threads)
        )
        return y[..., : self._rows]


class NativeGroups(Groups, Native):
    """A rounded weight that native.c multiplies by, on a CPU that adds products in 16 bits."""

    size = 4

    @classmethod
    def round(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See Kernel. native.c takes a quarter of the time of PyTorch's operations."""
        weight = weight.contiguous()
        rounded = torch.empty(weight.shape, dtype=torch.int8)
        scale = torch.empty(len(weight))
        tried = torch.tensor(TRIED)
        cls.library().round_groups(
            *(*weight.shape, weight.data_ptr(), TINY, LARGEST_SUM),
            *(len(tried), tried.data_ptr(), rounded.data_ptr(), scale.data_ptr()),
            torch.get_num_threads(),
        )
        return rounded, scale


class Fbgemm(Groups, LibraryKernel):
    """A rounded weight that FBGEMM multiplies by."""

    size = 2
    rounded = False

    def __init__(self, rounded: Tensor, scale: Tensor) -> None:
        """See Kernel."""
        zeros = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():  # quantized tensors are deprecated
            warnings.simplefilter("ignore")
            weight = torch._make_per_channel_quantized_tensor(
                rounded, (scale / MOST).double(), zeros, 0
            )
        engine = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            self._packed = torch.ops.quantized.linear_prepack(weight, None)
        finally:
            torch.backends.quantized.engine = engine

    def multiply(self, scaled: Tensor) -> Tensor:
        """See Kernel."""
        multiply = getattr(torch.ops.quantized, FBGEMM_PRODUCT)
        y: Tensor = multiply(scaled, 1.0, ZERO_POINT, self._packed)
        return y


def pack(weight: Tensor, kernel: type[Kernel]) -> Kernel:
    """Round and pack a float32 weight (d', d)."""
    parts = [kernel.round(rows) for rows in weight.split(BLOCK)]
    return kernel(*map(torch.cat, zip(*parts)))


@cache
def exact_kernel() -> type[Kernel] | None:
    """Return the first kernel with exact sums on this CPU; None if no kernel is exact.

    Each kernel is compared with 64-bit integer products, extreme values included.
    """
    # On other CPUs both libraries compute in plain loops, slower than float32.
    if not torch.cpu.get_capabilities().get("avx2", False):
        return None
    kernels: list[type[Kernel]] = []
    native = library()
    if native is None:
        warn_without_library("int8")
    else:
        kernels.append(NativeGroups if native.adds_in_sixteen_bits() else Native)
    if torch.backends.mkldnn.is_available():
        kernels.append(OneDNN)
    # PyTorch has deprecated quantized tensors and may have removed them.
    engines = torch.backends.quantized.supported_engines
    if "fbgemm" in engines and hasattr(torch.ops.quantized, FBGEMM_PRODUCT):
        kernels.append(Fbgemm)
    for kernel in kernels:
        if all(is_exact(kernel, rows) for rows in (1, 5, 16)):
            return kernel
    return None


def is_exact(kernel: type[Kernel], rows: int) -> bool:
    """Return whether the product of `rows` rows of integers is the 64-bit integer product."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-MOST, MOST + 1, (n, 576), generator=generator)
        for n in (rows, 96)
    )
    x[:, 0] = MOST  # so that no row is scaled
    x[0], weight[0], weight[1] = MOST, MOST, -MOST  # the largest sums
    weight[2, ::2], weight[2, 1::2] = MOST, -MOST
    limited = kernel.limit(weight.to(torch.int8))
    scale = torch.full((96,), float(MOST))
    expected = (x @ limited.long().T).float() * MOST
    return torch.equal(kernel(limited, scale)(x.float()), expected)
