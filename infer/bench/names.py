"""Names that results and reports share. Nothing here imports PyTorch."""

from collections.abc import Sequence

# Decoders in the rows of a result
PLAIN = "plain"
PLAIN_AGAIN = "plain, again"  # plain decoding measured as if it was another decoder
BASE = "base, plain"
PEER = "hf "  # the beginning of the names of Transformers' decoders
SDSAT = "sdsat k="  # followed by the number of adaptive tokens
LOSS = "loss"  # the metric of held-out documents, in nats a token
#: The parts of a step of GSD, in milliseconds (GSD, Table 3)
TIMES = ("draft_ms", "verification_ms", "rest_ms")
#: Ranks of a draft model's candidates that a report counts (GSD, Figures 7 and 8)
RANKS = 4


def k_of(name: str) -> int | None:
    """Return the k of a decoder named "sdsat k=5"; None for another decoder."""
    return int(name.removeprefix(SDSAT)) if name.startswith(SDSAT) else None


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names in order, with #2, #3, ... after a name that came before.

    Results find a row by its name, and rows of files may share one: a, b, a -> a, b, a#2.
    """
    taken = set(names)
    counts: dict[str, int] = {}
    result = []
    for name in names:
        count = counts.get(name, 0) + 1
        while count > 1 and f"{name}#{count}" in taken:
            count += 1
        counts[name] = count
        result.append(f"{name}#{count}" if count > 1 else name)
    return result
