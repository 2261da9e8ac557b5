"""Print text on a terminal while it is decoded, coloured by the source of each token.

The colours are Okabe and Ito's, which are distinct for colour-blind readers. They are
backgrounds, so that white space is visible too; underlines mark two colours that look alike.
If the output is not a terminal, it is the new text alone, without colours, and the line of
figures goes to standard error.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from conf.console import pictures, speed
from conf.errors import counted
from infer.api import TextStep
from infer.config import SOURCES
from infer.loop import Step


@dataclass(frozen=True)
class SourceStyle:
    """The name and the colour of accepted drafts of one source."""

    name: str
    meaning: str
    strong: str  # the background of black text, and the colour in plots
    underline: bool = False

    @cached_property
    def style(self) -> Style:
        """The style on a terminal, readable on dark and light backgrounds."""
        return Style(
            color="#000000", bgcolor=self.strong, underline=self.underline or None
        )


_OF_SOURCES = (  # in the order of config.SOURCES
    SourceStyle("adaptive", "adaptive tokens", "#56b4e9"),
    SourceStyle("text", "n-grams of this text", "#e69f00"),
    SourceStyle("n-grams", "n-grams of the training data", "#009e73", underline=True),
)
#: The style of accepted drafts, by their kind (Step.kinds).
SOURCE_STYLES = {
    **dict(zip(SOURCES, _OF_SOURCES, strict=True)),
    "drafted": SourceStyle("drafted", "drafted and accepted", "#f0e442"),
    "shared": SourceStyle("shared", "after a merged node", "#cc79a7", underline=True),
}
PROMPT_STYLE = Style.parse("bright_black")


@dataclass
class Summary:
    """The counts and times of one text. A step is one forward."""

    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0  # time of the first step
    last: float = 0.0  # time of the last step
    first_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    sources: Counter[str] = field(default_factory=Counter)  # accepted drafts by source

    def add(self, step: Step) -> None:
        """Add a step and the time at which it was finished."""
        self.last = time.perf_counter()
        if not self.forwards:
            self.first = self.last
            self.first_tokens = len(step.tokens)
        self.tokens += len(step.tokens)
        self.forwards += 1
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.sources.update(step.sources)

    def __str__(self) -> str:
        """Format one line. The speed excludes the first step, which reads the prompt."""
        parts = [counted(self.tokens, "token")]
        if self.forwards > 1:
            seconds = max(self.last - self.first, 1e-6)
            parts.append(speed((self.tokens - self.first_tokens) / seconds))
        parts.append(f"{self.tokens / self.forwards:.2f} tokens per forward")
        if self.drafted:
            share = 100 * self.accepted / self.drafted
            parts.append(f"{share:.0f} % of {counted(self.drafted, 'draft')} accepted")
        if len(self.sources) > 1:
            shares = [
                f"{kind.name} {100 * self.sources[source] / self.accepted:.0f} %"
                for source, kind in SOURCE_STYLES.items()
                if source in self.sources
            ]
            parts[-1] += f" ({', '.join(shares)})"
        return f"{', '.join(parts)}; first token after {self.first - self.began:.2f} s"


def show(
    steps: Iterable[TextStep], console: Console, before: str, after: str = ""
) -> Summary:
    """Print the text between `before` and `after` while it is decoded, then its figures.

    Return the figures.
    """
    summary = Summary()
    terminal = console.is_terminal
    kinds: set[str] = set()
    if terminal:
        _write(console, pictures(before), PROMPT_STYLE)
    for step in steps:
        summary.add(step)
        if not terminal:
            _write(console, step.text)
            continue
        kinds.update(step.kinds)
        for text, kind in zip(step.texts, step.kinds, strict=True):
            _write(
                console,
                pictures(text),
                SOURCE_STYLES[kind].style if kind in SOURCE_STYLES else None,
            )
    if terminal:
        _write(console, pictures(after), PROMPT_STYLE)
        legend = [Text("prompt", PROMPT_STYLE), Text("the model's own")]
        for kind, style in SOURCE_STYLES.items():
            if kind in kinds:
                legend.append(Text(style.meaning, style.style))
        console.print("\n\n", Text("  ").join(legend), sep="")
    else:
        _write(console, "\n")
        console = Console(stderr=True, quiet=console.quiet)
    console.print(str(summary), highlight=False, markup=False, soft_wrap=True)
    return summary


def _write(console: Console, text: str, style: Style | None = None) -> None:
    # Segments preserve tabs. A styled line end would colour the whole next line.
    parts = [
        Segment(part, None if part == "\n" else style)
        for part in re.split("(\n)", text)
        if part
    ]
    console.print(Segments(parts), end="", soft_wrap=True)
