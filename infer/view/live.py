"""Decoded text on a terminal, as it comes, drafted tokens in another colour than the model's own.

After Figure 6 of GSD. Where the output is no terminal it is the new text alone and a line's end, without
colours; the line of figures goes to standard error.
"""

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from conf.characters import pictures
from infer.api import TextStep
from infer.view.summary import Summary

GIVEN, DRAFTED, SHARED = (Style.parse(style) for style in ("bright_black", "bold green", "bold blue"))
STYLES = {"drafted": DRAFTED, "shared": SHARED}
LEGEND = Text.assemble(("given", GIVEN), "  the model's own  ", ("drafted and accepted", DRAFTED))
OF_GRAPHS = Text.assemble(LEGEND, "  ", ("behind a merged node", SHARED))


class View:
    """One text, between what was given before it and after it."""

    def __init__(self, console: Console, before: str, after: str = "") -> None:
        self._console, self._after = console, after
        self._shared = False
        self._figures = console if console.is_terminal else Console(stderr=True, quiet=console.quiet)
        if console.is_terminal:
            self._write(pictures(before), GIVEN)

    def step(self, step: TextStep) -> None:
        """Show one more step."""
        if not self._console.is_terminal:
            self._write(step.text)
            return
        self._shared |= step.shared > 0
        for text, kind in zip(step.texts, step.kinds, strict=True):
            self._write(pictures(text), STYLES.get(kind))

    def close(self, summary: Summary) -> None:
        """Show what follows the text, and a line of figures."""
        if self._console.is_terminal:
            self._write(pictures(self._after), GIVEN)
            self._console.print("\n\n", OF_GRAPHS if self._shared else LEGEND, sep="")
        else:
            self._write("\n")
        self._figures.print(str(summary), highlight=False, markup=False, soft_wrap=True)

    def _write(self, text: str, style: Style | None = None) -> None:
        # As a segment, since tabs of anything else become spaces.
        self._console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)
