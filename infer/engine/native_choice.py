"""The choice of tokens by native.c, for output heads with rounded weights. See pick.py.

Picks read all logits of a row several times: the largest, the noise of sampling, the nucleus. In C that takes
0.2 to 0.5 times as long as by NumPy and PyTorch (tests.benchmarks.choice).
"""

from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_long, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from infer.engine.sampling import Sampling


class COutput(Structure):
    """`output` of choice.h."""

    _fields_ = [
        *((name, c_long) for name in ("V", "stride")),
        ("logits", c_void_p),
        *((name, c_long) for name in ("again", "d")),
        *((name, c_void_p) for name in ("hidden", "weight", "bias")),
    ]


class NativeRows:
    """n rows of logits (n, V). The `again` largest of a row are computed again from its hidden state (d,).

    `weight` and `bias` belong to the output head. A pick changes the logits for a moment.
    """

    def __init__(
        self,
        native: CDLL,
        hidden_nd: Tensor,
        logits_nV: Tensor,
        again: int,
        weight: Tensor,
        bias: Tensor | None,
    ) -> None:
        self._native = native
        self._kept = hidden_nd, logits_nV  # C reads their memory
        n, V = logits_nV.shape
        self._n = n
        self._V = V
        self._c = COutput(
            *(V, logits_nV.stride(0), logits_nV.data_ptr()),
            *(min(again, V), hidden_nd.shape[1], hidden_nd.data_ptr()),
            *(weight.data_ptr(), None if bias is None else bias.data_ptr()),
        )

    def top(self, m: int) -> tuple[Tensor, Tensor]:
        """Return the (n, m) largest logits in decreasing order, and their ids; m is at most V."""
        values, ids = self._results(m)
        self._native.top(
            *(byref(self._c), self._n, m, values.data_ptr(), ids.data_ptr()),
            torch.get_num_threads(),
        )
        return values, ids

    def pick(self, sampling: Sampling, keys: Sequence[int]) -> Tensor:
        """Return the (n,) tokens that are sampled with the noise of these keys (noise.py)."""
        if sampling.top_k:
            return self.noisy_top(sampling, keys, self._V, 1)[1][:, 0]
        picks = torch.empty(self._n, dtype=torch.int64)
        self._native.pick_noisiest(
            *(byref(self._c), self._n, sampling.temperature, sampling.top_p),
            *(_array(keys), picks.data_ptr()),
        )
        return picks

    def noisy_top(
        self, sampling: Sampling, keys: Sequence[int], most: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return `count` noisy scores of each row in decreasing order, and their ids.

        They are the largest of at most `most` leading tokens. Tokens that are not sampled have -inf.
        """
        m = min(sampling.top_k or most, self._V)
        count = min(count, m)
        sums, ids = self._results(count)
        self._native.noisy_top(
            *(byref(self._c), self._n, m, count),
            *(sampling.temperature, sampling.top_p, not sampling.top_k, _array(keys)),
            *(sums.data_ptr(), ids.data_ptr(), torch.get_num_threads()),
        )
        return sums, ids

    def _results(self, count: int) -> tuple[Tensor, Tensor]:
        return (
            torch.empty(self._n, count),
            torch.empty(self._n, count, dtype=torch.int64),
        )


def _array(keys: Sequence[int]) -> Any:
    return (c_uint64 * len(keys))(*keys)
