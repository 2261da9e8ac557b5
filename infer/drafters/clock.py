"""L(q) held against the clock: what steps of a loop really took corrects what was measured before.

Decisions hang on L(q) / L(1) alone, and a machine is faster now and slower then. So now and then a step is
plain (`is_plain`): the time of such steps of late says how fast the machine is, and other steps are held
against it.
"""

from bisect import bisect_left

from infer.drafters.costs import Costs
from infer.engine.clock import FINE

PLAIN, EVERY = 1, 128  # of a text the second step is plain, and every so many behind it: the first may be cold
FOLLOWED, LEARNED = 1 / 4, 1 / 32  # shares of one step in the time of plain steps, and in a point
WILD = 2.0  # times as long as expected, or as short: what is beyond met something else
LAID_OUT = 16  # steps between two tables


def is_plain(step: int) -> bool:
    """Whether a text's step is to be plain, so that it says how fast the machine is."""
    return step % EVERY == PLAIN


class LoopCosts:
    """Milliseconds of a step by rows, up to `most`: `ms[q]` is L(q), `slopes[q]` the price of the next row."""

    def __init__(self, costs: Costs, most: int) -> None:
        self._rows, self._points, self._most = costs.rows, list(costs.ms), most
        self._plain: float | None = None  # milliseconds of a plain step of late, by the loop's clock
        self._steps = 0
        self._lay_out()

    def __call__(self, q: int) -> float:
        """L(q); a batch may have more rows than a tree."""
        return self.ms[q] if q <= self._most else Costs(self._rows, tuple(self._points))(q)

    def observe(self, q: int, ms: float) -> float:
        """Learn that a step of q rows took `ms`; return its time in plain steps."""
        ms = max(ms, 1e3 * FINE)  # by no clock is it free
        if self._plain is None:
            self._plain = ms if q == 1 else None
            return self(q) / self.ms[1]
        if q == 1:
            self._plain += FOLLOWED * (min(ms, WILD * self._plain) - self._plain)
            return 1.0
        spent = ms / self._plain
        surprise = min(max(spent * self.ms[1] / self(q), 1 / WILD), WILD) - 1
        for point, share in self._beside(q):
            self._points[point] *= 1 + LEARNED * share * surprise
        self._steps += 1
        if self._steps % LAID_OUT == 0:
            self._lay_out()
        return spent

    def _beside(self, q: int) -> list[tuple[int, float]]:
        """The measured points on both sides of q but the first, and their shares in it."""
        rows = self._rows
        right = min(bisect_left(rows, q), len(rows) - 1)
        if rows[right] <= q:
            return [(right, 1.0)]
        share = (q - rows[right - 1]) / (rows[right] - rows[right - 1])
        return [(right - 1, 1 - share), (right, share)] if right > 1 else [(right, share)]

    def _lay_out(self) -> None:
        costs, ms = Costs(self._rows, tuple(self._points)), [0.0]
        for q in range(1, self._most + 1):
            ms.append(max(ms[-1], costs(q)))  # more rows never cost less
        self.ms, self.slopes = ms, slopes(ms)


def slopes(ms: list[float]) -> list[float]:
    """The price of the next row behind each number of rows: the least per row on the way to any more.

    Where the second row costs as much as a forward and the next six nothing, no row would be bought singly.
    """
    return [min((ms[more] - ms[q]) / (more - q) for more in range(q + 1, len(ms))) for q in range(len(ms) - 1)]
