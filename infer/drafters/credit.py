"""Drafting on credit: what it may lose against plain decoding is bounded.

What drafting loses is taken from the credit and what it gains is added, up to a limit; when it is used
up, decoding is plain, and a small share of that time is put aside for the next attempt. So
decoding takes at most that share longer than plain decoding does, and the first credit once.
"""

AGAIN, FIRST, MOST = 2.0, 4.0, 24.0  # plain forwards' time: to try again, at first, at most
PUT_ASIDE = 0.01  # of the time of plain decoding


class Credit:
    """`drafting` says whether there is any; `plain` is the time of a plain forward."""

    def __init__(self, plain: float) -> None:
        self._plain, self._left = plain, FIRST * plain
        self.drafting = True

    def account(self, tokens: int, spent: float) -> None:
        """What a step emitted, and its time."""
        gained = tokens * self._plain - spent
        if self.drafting:
            self._left = min(self._left + gained, MOST * self._plain)
            self.drafting = self._left > 0
        else:
            self._left += gained + PUT_ASIDE * spent
            self.drafting = self._left > AGAIN * self._plain
