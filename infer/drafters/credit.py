"""Drafting on credit: what it may lose against plain decoding is bounded.

What drafting loses is taken from the credit and what it gains is added, up to a limit; when it is used
up, decoding is plain, and a small share of that time is put aside for the next attempt. So
decoding takes at most that share longer than plain decoding does, and the first credit once.
"""

AGAIN, FIRST, MOST = 2.0, 6.0, 24.0  # plain steps: to try again, at first, at most
PUT_ASIDE = 0.01  # of a plain step


class Credit:
    """`drafting` says whether there is any."""

    def __init__(self) -> None:
        self._left, self.drafting = FIRST, True

    def account(self, tokens: int, spent: float) -> None:
        """What a step emitted, and its time in plain steps."""
        gained = tokens - spent
        if self.drafting:
            self._left = min(self._left + gained, MOST)
            self.drafting = self._left > 0
        else:
            self._left += min(gained, 0.0) + PUT_ASIDE
            self.drafting = self._left > AGAIN
