"""The terminal that reports, tables and sequences are printed on."""

from typing import Any

from rich.console import Console
from rich.text import Text

from conf.characters import pictures


class PlainConsole(Console):
    """Rich's console for text that others wrote: nothing in a string, a title or a cell is markup, the name of
    an emoji or a terminal's command. Colours are given as Text and Style.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that rich prints comes through here."""
        return super().render_str(pictures(text), **options)
