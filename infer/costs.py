"""L(q): what a forward of q rows costs on this device, measured once and kept.

The cost is that of a loop's whole step, so that a row of drafts is weighed with all it brings:
the forward, the picks and the reading of the drafts. Kept for a week, by device, threads, ranks, model,
dtype, batch and context (up to 4,096 tokens), in the user's cache folder.
"""

import hashlib
import json
import os
import platform
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from conf.stage import write_json
from infer.checkpoint import context_length
from infer.gate import GatedLinear
from infer.hardware import processor
from infer.parallel import agreed_value, shares
from infer.pick import GREEDY, Sampling
from infer.reading import Request
from infer.runner import Runner
from infer.tree import Tree

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
ENOUGH = 4.0  # times L(1): no number of accepted drafts pays for more rows than that
SECONDS = 3.0  # to measure in, more or less
BURST = 4  # steps of the same rows on end
TURNS = 9  # of two models
WIDTH = 4  # candidates read
SLOW = 0.3  # seconds of a forward from which the wait is announced
SCHEMA = 3  # of what is kept, and of how it is measured
WEEK = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step by rows in each sequence, between the measured ones by straight lines."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    def __call__(self, q: int) -> float:
        """L(q); beyond the last measured one by the last slope."""
        right = min(max(1, bisect_right(self.rows, q)), len(self.rows) - 1)
        (q0, q1), (t0, t1) = self.rows[right - 1 : right + 1], self.ms[right - 1 : right + 1]
        return t0 + (t1 - t0) * (q - q0) / (q1 - q0)


def find_costs(lm: PreTrainedModel, *, batch: int, capacity: int) -> Costs:
    """L(q) at half of a context of about `capacity` tokens, from the cache folder or measured now."""
    context = _context(capacity, lm)
    path = _folder() / f"costs-{_key(lm, batch, context)}.json"
    known = agreed_value(lm, _read(path))
    if known is not None:
        return known
    costs = measure_costs(lm, batch=batch, context=context)
    with suppress(OSError):  # a home that cannot be written: the next process measures again
        write_json(path, {"rows": costs.rows, "ms": costs.ms, "device": device_name(lm)})
    return costs


def context_of(capacity: int) -> int:
    """The context measured at, for texts of up to `capacity` tokens: about half of it."""
    return min(4096, max(512, 2 ** (capacity - 1).bit_length())) // 2


def _context(capacity: int, *lms: PreTrainedModel) -> int:
    """The same, as far as these models have positions: learned ones end."""
    return min(context_of(capacity), *(context_length(lm.config) for lm in lms))


def _read(path: Path) -> Costs | None:
    """What was measured before; None where nothing was yet, too long ago, or by another version."""
    try:
        if time.time() - path.stat().st_mtime > WEEK:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        return Costs(tuple(found["rows"]), tuple(found["ms"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_both(
    target: PreTrainedModel, draft: PreTrainedModel, *, batch: int, capacity: int, sampling: Sampling
) -> tuple[Costs, Costs]:
    """L(q) of a target and of what drafts for it, on one scale.

    Their tables were measured at different moments of a machine that is now faster and now slower. What a
    draft is worth hangs on the ratio of the two, so a row of each is timed again, in turns; of the draft
    model with what may follow it, which of sampled text takes longer.
    """
    ours, theirs = (find_costs(lm, batch=batch, capacity=capacity) for lm in (target, draft))
    context = _context(capacity, target, draft)
    benches = [
        Bench(target, batch=batch, context=context),
        Bench(draft, batch=batch, context=context, drafts=sampling),
    ]
    for bench in benches:
        bench.burst(1)  # warms up
    times = np.array([[bench.burst(1) for bench in benches] for _ in range(TURNS)])
    ratio = agreed_value(target, float(np.median(times[:, 1] / times[:, 0])))
    scale = ratio * ours(1) / theirs(1)
    return ours, Costs(theirs.rows, tuple(scale * ms for ms in theirs.ms))


class Bench:
    """Steps of a loop on a model, against the clock; with `drafts`, levels of a draft model."""

    def __init__(
        self, lm: PreTrainedModel, *, batch: int, context: int, drafts: Sampling | None = None
    ) -> None:
        self._lm, self._runner = lm, Runner(lm, capacity=context, max_rows=ROWS[-1], batch=batch)
        self._drafts = drafts
        token = lm.config.vocab_size // 2
        self._requests = [Request([token])] * batch
        # All rows fit the same columns, so that fixed shapes of the cache are the same for one row and many.
        self._runner.prefill([[token] * (context - ROWS[-1])] * batch)

    def burst(self, q: int) -> float:
        """Seconds of a step among its like, as steps of plain decoding are: the first finds the processor's
        caches as another number of rows has left them.
        """
        return statistics.median([self.step(q) for _ in range(BURST)][1:])

    def step(self, q: int) -> float:
        """Seconds of a forward of q rows, its picks, and the reading of drafts."""
        token = self._requests[0].prompt[0]
        tree, batch = Tree.chain(token, probes=[token] * (q - 1)), len(self._requests)
        began = time.perf_counter()
        if self._drafts:
            reading = self._runner.forward([tree] * batch, self._requests, self._drafts, [0] * batch)
            for b in range(batch):
                reading.following(b, [0], WIDTH)
        else:
            reading = self._runner.forward([tree] * batch, self._requests, GREEDY)
            for b in range(batch):
                tree.walk(reading.chooser(b, ()))
                reading.drafts(b, 0, WIDTH)
        return agreed_value(self._lm, time.perf_counter() - began)


def measure_costs(lm: PreTrainedModel, *, batch: int, context: int) -> Costs:
    """Times of the rows in turns, so that a change of the machine's speed meets them alike."""
    bench = Bench(lm, batch=batch, context=context)
    rows, first = list[int](), 0.0
    for q in ROWS:
        last = min(bench.step(q) for _ in range(3))  # the first warms up
        if not first and last > SLOW:
            print("measuring, once, what a forward of several rows costs here ...", file=sys.stderr)
        first = first or last
        rows.append(q)
        if last > ENOUGH * first and len(rows) > 2:
            break
    turns = max(3, min(15, int(SECONDS / (2 * BURST * first * len(rows)))))
    times = np.array([[bench.burst(q) for q in rows] for _ in range(turns)])
    # Shares of their turn first: a turn on a slow moment of the machine says as much as another.
    shares = np.median(times / times.sum(1, keepdims=True), axis=0)
    ms = 1e3 * np.median(times.sum(1)) * rising(shares)
    return Costs(tuple(rows), tuple(ms.tolist()))


def rising(values: Sequence[float]) -> np.ndarray:
    """The nearest values that never fall (isotonic regression, by pooling adjacent violators): more
    rows never cost less, and where they seem to, that is the clock's noise.
    """
    means, counts = list[float](), list[int]()
    for value in values:
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            total = means[-2] * counts[-2] + means[-1] * counts[-1]
            counts[-2:] = [counts[-2] + counts[-1]]
            means[-2:] = [total / counts[-1]]
    return np.repeat(means, counts)


def device_name(lm: PreTrainedModel) -> str:
    """What the model runs on."""
    if lm.device.type == "cuda":
        return torch.cuda.get_device_name(lm.device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)"


def _key(lm: PreTrainedModel, batch: int, context: int) -> str:
    config = {key: value for key, value in lm.config.to_dict().items() if not key.startswith("_")}
    gated = any(isinstance(module, GatedLinear) for module in lm.modules())
    # Two machines may share a home: where no processor has a name, the machine's tells them apart.
    facts = [SCHEMA, device_name(lm), processor() or platform.node(), shares(lm), torch.__version__]
    facts += [str(lm.dtype), config, gated, batch, context]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "adaptive-tokens"
