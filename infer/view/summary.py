"""What a decoding came to: counts and times, and one line of them."""

import time
from collections import Counter
from dataclasses import dataclass, field

from conf.clock import duration
from infer.loop import Step
from infer.view.coloured import KINDS


@dataclass
class Summary:
    """Counts and times of one decoding, in steps and seconds."""

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None  # when the first step was there
    last: float = 0.0
    first_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    sources: Counter[str] = field(default_factory=Counter)  # accepted drafts by source

    def add(self, step: Step) -> None:
        """One more step, now."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first, self.first_tokens = self.last, len(step.tokens)
        self.tokens += len(step.tokens)
        self.forwards += 1
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.sources.update(step.sources)

    def __str__(self) -> str:
        """One line. The rate counts what came after the first step, whose time is the prompt's too."""
        assert self.first is not None
        later = self.tokens - self.first_tokens
        parts = [f"{self.tokens} token{'s' * (self.tokens > 1)}"]
        if later:
            parts.append(f"{later / duration(self.first, self.last):.0f} tokens/s")
        parts.append(f"{self.tokens / self.forwards:.2f} tokens per forward")
        if self.drafted:
            parts.append(f"{100 * self.accepted / self.drafted:.0f} % of {self.drafted} drafts accepted")
        if len(self.sources) > 1:
            shares = (
                f"{kind.name} {100 * self.sources[source] / self.accepted:.0f} %"
                for source, kind in KINDS.items()
                if source in self.sources
            )
            parts[-1] += f" ({', '.join(shares)})"
        return f"{', '.join(parts)}; first token after {self.first - self.began:.2f} s"
