"""L(q) held against the clock: what steps of a loop really took corrects what was measured before.

The machine may be faster or slower now than it was then; that meets all q alike and changes no decision. So
each step is first divided by the pace of late, and what remains corrects the measured points beside its q.
"""

from infer.drafters.costs import Costs

PACE = 1 / 32  # of the machine's speed
LEARNED = 1 / 64  # of a point's correction
WILD = 2.0  # a step so many times as long as expected, or as short, met something else


class LoopCosts:
    """Milliseconds of a step by rows, up to `most`: `ms[q]` is L(q), `slopes[q]` the price of the next row."""

    def __init__(self, costs: Costs, most: int) -> None:
        self._rows, self._most, self._pace = costs.rows, most, 1.0
        self._points = list(costs.ms)
        self._due = 0
        self._lay_out()

    def __call__(self, q: int) -> float:
        """L(q); a batch may have more rows than a tree."""
        return self.ms[q] if q <= self._most else Costs(self._rows, tuple(self._points))(q)

    def observe(self, q: int, ms: float) -> None:
        """Learn that a step of q rows took `ms`."""
        ratio = min(max(ms / self(q), self._pace / WILD), self._pace * WILD)
        self._pace += PACE * (ratio - self._pace)
        surprise = ratio / self._pace - 1
        for point, share in self._beside(q):
            self._points[point] *= 1 + LEARNED * share * surprise
        self._due -= 1
        if self._due <= 0:
            self._due = 16
            self._lay_out()

    def _beside(self, q: int) -> list[tuple[int, float]]:
        """The measured points on both sides of q, and their shares in it."""
        rows = self._rows
        right = next((i for i, row in enumerate(rows) if row >= q), len(rows) - 1)
        if rows[right] <= q or not right:
            return [(right, 1.0)]
        share = (q - rows[right - 1]) / (rows[right] - rows[right - 1])
        return [(right - 1, 1 - share), (right, share)]

    def _lay_out(self) -> None:
        costs = Costs(self._rows, tuple(self._points))
        ms = [0.0]
        for q in range(1, self._most + 1):
            ms.append(max(ms[-1], costs(q)))  # more rows never cost less
        self.ms = ms
        self.slopes = slopes(ms)


def slopes(ms: list[float]) -> list[float]:
    """The price of the next row behind each number of rows: the least per row on the way to any more.

    Where the second row costs as much as a forward and the next six nothing, no row would be bought singly.
    """
    return [min((ms[more] - ms[q]) / (more - q) for more in range(q + 1, len(ms))) for q in range(len(ms) - 1)]
