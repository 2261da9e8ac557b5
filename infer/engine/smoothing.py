"""Factors that move large inputs of int8 products into the weights (SmoothQuant, arXiv 2211.10438).

    W x = (W diag(s)) (x / s)

Some columns of x are many times as large as the other columns, most of all for a text's first token.
With one scale for each row they leave few of the 255 levels to the other columns. A weight has a scale
for each output, so it loses little if a few of its columns grow:

    s_j = max(1, m_j / (c mean m))^a         m_j = max_r |x_rj|, rows r, columns j

s is rounded to powers of two, so that x / s is exact. The inputs of all products are recorded when a
model is loaded, for the tokens of SAMPLE. Each product takes the a and c of CANDIDATES with the
smallest error. The s of one half of the text is measured on the other half, because some columns are
large in few texts. The first token is in both halves, because it begins every text.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conf.devices.int8 import MOST, TINY

#: Prose and code.
SAMPLE = '''# Moving average

The function returns the mean of the last `n` values. It raises ValueError if there are fewer than
n values, e.g. for [3, 1] and n = 3.

```python
import math
from collections import deque


class Window:
    """Keep the last n numbers of a stream."""

    def __init__(self, n: int = 10) -> None:
        self.values = deque(maxlen=n)

    def add(self, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError(f"value must be finite, got {value!r}")
        self.values.append(value)
        return sum(self.values) / len(self.values)
```
'''
TOKENS = 128  # the largest number of tokens of the sample
PART = 128  # rows of a weight that are squared at once, in the CPU's cache
#: a and c of s; with a = 0 nothing changes.
CANDIDATES = ((0.0, 1.0), *((a, c) for a in (0.5, 1.0) for c in (0.5, 1.0, 2.0, 4.0)))


@torch.inference_mode()
def record_inputs(
    lm: Any, layers: Iterable[nn.Linear], ids: Sequence[int]
) -> dict[nn.Linear, Tensor]:
    """Return the input rows (n, d) of a model's linear layers for a text of n ids.

    Layers with the same input share its memory. A layer that the text does not use is left out.
    """
    inputs: dict[nn.Linear, Tensor] = {}

    def record(layer: Any, arguments: tuple[Tensor, ...]) -> None:
        inputs[layer] = arguments[0].flatten(0, -2)

    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        lm(torch.tensor([ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def smoothing(x_nd: Tensor, weight: Tensor) -> Tensor:
    """Return s (d,) for inputs like x_nd, at least three rows, of a product with `weight` (d', d)."""
    energy = sum(part.square().sum(0) for part in weight.split(PART))
    columns, outputs = (
        torch.maximum(weight.amax(dim), -weight.amin(dim)).clamp_(min=TINY)
        for dim in (0, 1)
    )
    # Every row is divided by about the length of its product: errors are relative.
    x_nd = x_nd / (x_nd.square() @ energy).sqrt()[:, None].clamp_(min=TINY)
    first, *parts = x_nd.tensor_split([1, len(x_nd) // 2])
    halves = [torch.cat([first, part]) for part in parts]

    def error(candidate: tuple[float, float]) -> float:
        """Return the squared error of both halves, each by the factors of the other half."""
        total = 0.0
        for seen, new in (halves, halves[::-1]):
            s = factors(seen, *candidate)
            x = new / s
            step = x.abs().amax(1, keepdim=True).clamp_(min=TINY) / MOST
            rounding = (x / step).round_().mul_(step).sub_(x)
            of_inputs = rounding.square_().sum(0) @ (energy * s**2)
            # As if the largest weight of each output grew as the largest of all does.
            growth = (columns * s).amax() / columns.amax() / MOST
            of_weights = (outputs * growth).square().sum() / 12 * x.square().sum()
            total += float(of_inputs + of_weights)
        return total

    return factors(x_nd, *min(CANDIDATES, key=error))


def factors(x_nd: Tensor, a: float, c: float) -> Tensor:
    """Return s (d,) of rows x_nd."""
    largest = x_nd.abs().amax(0)
    shares = largest / (c * largest.mean()).clamp_(min=TINY)
    return shares.clamp_(min=1).log2_().mul_(a).round_().exp2_()
