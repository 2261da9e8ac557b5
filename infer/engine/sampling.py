"""What is drawn from, by its settings. Knows no torch, since the settings of every entry are read before it."""

import hashlib
from dataclasses import dataclass

COLDEST = 1e-30  # logits divided by less are beyond what float32 can tell apart


@dataclass(frozen=True)
class Sampling:
    """The target distribution, as Transformers' warpers make it: temperature, then top_k, then top_p."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0

    @property
    def cheap(self) -> bool:
        """Whether a pick looks at the leading tokens alone."""
        return self.temperature == 0 or self.top_k > 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or COLDEST <= self.temperature < float("inf")):
            valid = f"0 (the likeliest token) or at least {COLDEST:g}"
            raise ValueError(f"temperature must be {valid}, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be a share above 0, up to 1, got {self.top_p}"
            )


GREEDY = Sampling()
SEEDS = 2**63  # there are so many: numbers of up to 63 bits


def seed_from(*facts: object) -> int:
    """Return a seed of 63 bits that depends on these facts alone."""
    digest = hashlib.sha256("\0".join(map(str, facts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
