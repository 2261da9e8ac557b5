"""The settings of sampling. It does not import torch, so that settings are checked at once."""

import hashlib
from dataclasses import dataclass

COLDEST = 1e-30  # the lowest temperature: dividing logits by less overflows float32
SEEDS = 2**63  # the number of seeds, which have 63 bits


@dataclass(frozen=True)
class Sampling:
    """The sampling distribution: temperature, then top_k, then top_p, as in Transformers."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or COLDEST <= self.temperature < float("inf")):
            valid = f"0 (greedy) or at least {COLDEST:g}"
            raise ValueError(f"temperature must be {valid}, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


GREEDY = Sampling()


def seed_from(*values: object) -> int:
    """Return a seed of 63 bits that depends only on these values."""
    digest = hashlib.sha256("\0".join(map(str, values)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
