"""Decoded text on a terminal, as it comes, coloured by the source of each token.

After Figure 6 of GSD. Where the output is no terminal it is the new text alone and a line's end, without
colours; the line of figures goes to standard error.
"""

import re
from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from conf.characters import pictures
from infer.api import TextStep
from infer.view.coloured import KINDS, OWN
from infer.view.summary import Summary

GIVEN = Style.parse("bright_black")
# Black on a colour of its own: as readable on a dark terminal as on a light one.
STYLES = {
    name: Style(color="#000000", bgcolor=kind.strong, underline=kind.line == "solid" or None)
    for name, kind in KINDS.items()
}


def complete(
    steps: Iterable[TextStep], console: Console, before: str, after: str = ""
) -> tuple[list[TextStep], Summary]:
    """Show a text as its steps come, and return what was shown, with its figures."""
    summary, shown, view = Summary(), list[TextStep](), View(console, before, after)
    for step in steps:
        summary.add(step)
        shown.append(step)
        view.step(step)
    view.close(summary)
    return shown, summary


class View:
    """One text, between what was given before it and after it."""

    def __init__(self, console: Console, before: str, after: str = "") -> None:
        self._console, self._after = console, after
        self._kinds = set[str]()
        self._figures = console if console.is_terminal else Console(stderr=True, quiet=console.quiet)
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
            self._console.print("\n\n", self._legend(), sep="")
        else:
            self._write("\n")
        self._figures.print(str(summary), highlight=False, markup=False, soft_wrap=True)

    def _legend(self) -> Text:
        """Return what the colours of the text mean."""
        shown = [(KINDS[kind].meaning, style) for kind, style in STYLES.items() if kind in self._kinds]
        return Text("  ").join([Text("given", GIVEN), Text(OWN), *(Text(*one) for one in shown)])

    def _write(self, text: str, style: Style | None = None) -> None:
        # As segments, since tabs of anything else become spaces; a coloured line's end paints the next line.
        parts = [Segment(part, None if part == "\n" else style) for part in re.split("(\n)", text) if part]
        self._console.print(Segments(parts), end="", soft_wrap=True)
