"""Sets of prompts as token ids, to decode for speed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt; `ends` are the ids that end its text beside EOS: EOT, where it asks for a middle."""

    id: str
    ids: tuple[int, ...]
    ends: frozenset[int]
    before: str  # the text that the new one follows
    after: str  # and the one that follows it, where it is a middle
