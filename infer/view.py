"""Decoded text on a terminal, as it comes, drafted tokens in another colour than the model's own.

After Figure 6 of GSD. Where the output is no terminal it is the new text alone, without colours.
"""

from rich.console import Console
from rich.text import Text

from infer.api import TextStep
from infer.summary import Summary

GIVEN, DRAFTED = "bright_black", "bold green"
# No text may steer a terminal: control characters but tab and line end are shown as their pictures.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class View:
    """One text, between what was given before it and after it."""

    def __init__(self, console: Console, before: str, after: str = "") -> None:
        self._console, self._after = console, after
        self._show(before, GIVEN)

    def step(self, step: TextStep) -> None:
        """Show one more step."""
        if not self._console.is_terminal:
            self._console.out(step.text, end="", highlight=False)
            return
        for place, text in enumerate(step.texts):
            self._show(text, DRAFTED if place < step.accepted else None)

    def close(self, summary: Summary) -> None:
        """Show what follows the text, and a line of figures."""
        self._show(self._after, GIVEN)
        self._console.out("\n")
        if self._console.is_terminal:
            colours = Text.assemble(("given", GIVEN), "  the model's own  ", ("drafted", DRAFTED))
            self._console.print(colours, highlight=False)
        self._console.out(str(summary), highlight=False)

    def _show(self, text: str, style: str | None) -> None:
        if self._console.is_terminal and text:
            self._console.out(text.translate(PICTURES), style=style, end="", highlight=False)
