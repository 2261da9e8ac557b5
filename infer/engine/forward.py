"""One forward of trees, in one of two ways: the shapes as they come, or, in static.py, in few fixed ones."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from infer.engine.alibi import biased
from infer.engine.head import Logits
from infer.engine.reading import LazyReading, Reading, Request
from infer.engine.sampling import Sampling
from infer.engine.target import Target
from infer.trees.layout import Layout, key_positions, lay_out, mask
from infer.trees.tree import Tree


class Forward(Protocol):
    """A way through the model."""

    def __call__(
        self,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        fed: Sequence[int] | None = None,
    ) -> Reading:
        """What the model says of each sequence's tree; the rows wait in the cache behind its lengths."""
        ...


class DynamicForward:
    """As many rows and columns as there are: nothing is computed in vain, and every launch is paid for."""

    def __init__(self, target: Target) -> None:
        self._target = target
        # One row alone takes slow paths of the CPU's kernels in narrow types (attention up to 3.9
        # times two rows): plain decoding runs its row twice, or speculation would be flattered.
        self._least = 2 if target.device.type == "cpu" and target.dtype.itemsize < 4 else 1

    @staticmethod
    def room(capacity: int, max_rows: int, batch: int) -> int:
        """Rows of the cache that sequences of `capacity` tokens and the trees behind them take.

        Of several trees one may have the most drafts and another the most probes.
        """
        return capacity + (max_rows + 1 if batch == 1 else 2 * max_rows)

    def __call__(
        self,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        fed: Sequence[int] | None = None,
    ) -> LazyReading:
        """See Forward."""
        target = self._target
        layout, hidden_Bqd = self.hidden(trees, fed)
        hidden = hidden_Bqd.flatten(0, 1)
        logits = Logits(target.head, hidden, target.head(hidden))
        return LazyReading(logits, layout, trees, requests, sampling, target.agree)

    def hidden(self, trees: Sequence[Tree], fed: Sequence[int] | None = None) -> tuple[Layout, Tensor]:
        """The rows, and (B, q, d) what the decoder makes of them."""
        target, cache = self._target, self._target.cache
        probes = max(len(tree.tokens) - tree.probes_from for tree in trees)
        layout = lay_out(trees, cache.lengths, fed=fed, drafts=self._least - probes)
        cache.place(layout.ids.shape[1], fed)
        with target.gate.open(layout.drafts, layout.ids.shape[1]):
            hidden = target.hidden(
                torch.from_numpy(layout.ids).to(target.device),
                torch.from_numpy(layout.positions).to(target.device),
                self._masks(layout),
            )
        return layout, hidden

    def _masks(self, layout: Layout) -> dict[str, Tensor] | None:
        """By kind of layer; none for a row that is alone and sees everything."""
        target, lengths, end = self._target, self._target.cache.lengths, self._target.cache.slots.end
        alone = layout.seen.size == 1  # and not behind rows that it may not see
        if alone and target.slopes is None and all(w is None or end <= w for w in target.windows.values()):
            return None
        masks = {
            kind: torch.from_numpy(mask(layout, lengths, end, window=window)).to(target.device)
            for kind, window in target.windows.items()
        }
        if target.slopes is None:
            return masks
        at = torch.from_numpy(key_positions(layout, lengths, end)).to(target.device)
        return {kind: biased(attends, at, target.slopes, target.dtype) for kind, attends in masks.items()}
