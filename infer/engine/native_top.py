"""The likeliest tokens of a head in int8 by one call of native.c (pick.py without a C compiler)."""

from typing import Any

import torch
from torch import Tensor

from conf.devices.native import LANES, library


def native_top(
    head: Any, hidden_nd: Tensor, logits_nV: Tensor, m: int, exact: int
) -> tuple[Tensor, Tensor] | None:
    """Return the (n, m) largest logits in decreasing order, and their ids; None if native.c does not apply.

    The `exact` largest are computed again from the hidden states and the head's float32 weight.
    """
    native = library()
    n, V = logits_nV.shape
    tensors = logits_nV, hidden_nd, head.weight
    usual = all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors)
    if native is None or not usual or hidden_nd.shape[1] % LANES:
        return None
    values = logits_nV.new_empty(n, m)
    ids = torch.empty(n, m, dtype=torch.int64)
    native.top(
        *(n, V, logits_nV.data_ptr(), m, exact, hidden_nd.shape[1]),
        *(hidden_nd.data_ptr(), head.weight.data_ptr()),
        *(None if head.bias is None else head.bias.data_ptr(),),
        *(values.data_ptr(), ids.data_ptr()),
    )
    return values, ids
