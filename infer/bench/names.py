"""Names that results and reports share. Nothing here imports PyTorch."""

# Decoders in the rows of a result
PLAIN = "plain"
PLAIN_AGAIN = "plain, again"  # plain decoding measured as if it was another decoder
BASE = "base, plain"
PEER = "hf "  # the beginning of the names of Transformers' decoders
SDSAT = "sdsat k="  # followed by the number of adaptive tokens
#: The parts of a step of GSD, in milliseconds (GSD, Table 3)
TIMES = ("draft_ms", "verification_ms", "rest_ms")
#: Ranks of a draft model's candidates that a report counts (GSD, Figures 7 and 8)
RANKS = 4


def k_of(name: str) -> int | None:
    """Return the k of a decoder named "sdsat k=5"; None for another decoder."""
    return int(name.removeprefix(SDSAT)) if name.startswith(SDSAT) else None
