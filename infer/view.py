"""Decoded text for people as it comes, coloured by the source of each token.

The hues are Okabe and Ito's, which the colour-blind tell apart. Backgrounds show white space that was drafted;
underlines tell the sources apart where colours do not. Where the output is no terminal it is the new text alone
and a line's end, without colours; the line of figures goes to standard error.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from conf.console import pictures
from infer.api import TextStep
from infer.engine.runner import duration
from infer.loop import Step


@dataclass(frozen=True)
class SourceStyle:
    """How accepted drafts of one source look: the backgrounds of a page and of a terminal."""

    name: str
    meaning: str
    light: str
    strong: str  # behind black text, also in plots
    line: str = "none"  # the underline, as CSS spells it


KINDS = {  # of accepted drafts, as in Step.kinds
    "adaptive": SourceStyle("adaptive", "adaptive tokens", "#a8d4f5", "#56b4e9"),
    "text": SourceStyle("text", "n-grams of this text", "#ffcf70", "#e69f00", "dotted"),
    "ngrams": SourceStyle(
        "n-grams", "n-grams of the training data", "#8fd3b6", "#009e73", "solid"
    ),
    "drafted": SourceStyle("drafted", "drafted and accepted", "#f3eda0", "#f0e442"),
    "shared": SourceStyle(
        "shared", "behind a merged node", "#dbb4d2", "#cc79a7", "solid"
    ),
}
OWN = "the model's own"


def meaning(kind: str) -> str:
    """Return what a kind of `Step.kinds` means."""
    return KINDS[kind].meaning if kind in KINDS else OWN if kind == "own" else kind


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
        """Add one more step, now."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
            self.first_tokens = len(step.tokens)
        self.tokens += len(step.tokens)
        self.forwards += 1
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.sources.update(step.sources)

    def __str__(self) -> str:
        """Format one line. The rate counts what came after the first step, whose time is the prompt's too."""
        assert self.first is not None
        later = self.tokens - self.first_tokens
        parts = [f"{self.tokens} token{'s' * (self.tokens > 1)}"]
        if later:
            parts.append(f"{later / duration(self.first, self.last):.0f} tokens/s")
        parts.append(f"{self.tokens / self.forwards:.2f} tokens per forward")
        if self.drafted:
            parts.append(
                f"{100 * self.accepted / self.drafted:.0f} % of {self.drafted} drafts accepted"
            )
        if len(self.sources) > 1:
            shares = (
                f"{kind.name} {100 * self.sources[source] / self.accepted:.0f} %"
                for source, kind in KINDS.items()
                if source in self.sources
            )
            parts[-1] += f" ({', '.join(shares)})"
        return f"{', '.join(parts)}; first token after {self.first - self.began:.2f} s"


GIVEN = Style.parse("bright_black")
# Black on a colour of its own: as readable on a dark terminal as on a light one.
STYLES = {
    name: Style(
        color="#000000", bgcolor=kind.strong, underline=kind.line == "solid" or None
    )
    for name, kind in KINDS.items()
}


def complete(
    steps: Iterable[TextStep], console: Console, before: str, after: str = ""
) -> None:
    """Show a text as its steps come, then its figures."""
    summary = Summary()
    view = View(console, before, after)
    for step in steps:
        summary.add(step)
        view.step(step)
    view.close(summary)


class View:
    """One text, between what was given before it and after it."""

    def __init__(self, console: Console, before: str, after: str = "") -> None:
        self._console = console
        self._after = after
        self._kinds: set[str] = set()
        self._figures = (
            console
            if console.is_terminal
            else Console(stderr=True, quiet=console.quiet)
        )
        if console.is_terminal:
            self._write(pictures(before), GIVEN)

    def step(self, step: TextStep) -> None:
        """Show one more step."""
        if not self._console.is_terminal:
            self._write(step.text)
            return
        self._kinds.update(step.kinds)
        for text, kind in zip(step.texts, step.kinds, strict=True):
            self._write(pictures(text), STYLES.get(kind))

    def close(self, summary: Summary) -> None:
        """Show what follows the text, and a line of figures."""
        if self._console.is_terminal:
            self._write(pictures(self._after), GIVEN)
            parts = [
                Text(KINDS[kind].meaning, style)
                for kind, style in STYLES.items()
                if kind in self._kinds
            ]
            legend = Text("  ").join([Text("given", GIVEN), Text(OWN), *parts])
            self._console.print("\n\n", legend, sep="")
        else:
            self._write("\n")
        self._figures.print(str(summary), highlight=False, markup=False, soft_wrap=True)

    def _write(self, text: str, style: Style | None = None) -> None:
        # As segments, since tabs of anything else become spaces; a coloured line's end paints the next line.
        parts = [
            Segment(part, None if part == "\n" else style)
            for part in re.split("(\n)", text)
            if part
        ]
        self._console.print(Segments(parts), end="", soft_wrap=True)
