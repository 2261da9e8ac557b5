"""Sets of prompts as token ids, to decode for speed."""

from dataclasses import dataclass, replace

from infer.benchmarks.config import PromptSetConfig
from infer.prompts import load_prompts as old_prompts
from infer.text import Text


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt; `ends` are the ids that end its text beside EOS: EOT, where it asks for a middle."""

    id: str
    ids: tuple[int, ...]
    ends: frozenset[int]
    before: str  # the text that the new one follows
    after: str  # and the one that follows it, where it is a middle


def load_prompts(name: str, config: PromptSetConfig, text: Text, *, seed: int) -> list[TokenPrompt]:
    """As infer.prompts, until the benchmarks' own reader takes its place."""
    found = old_prompts(name, replace(config, key=config.key or "prompt"), text, seed=seed)
    return [
        TokenPrompt(f"{name}/{index}", tuple(ids), frozenset(), text.decode(ids), "")
        for index, ids in enumerate(found)
    ]
