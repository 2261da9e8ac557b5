"""Text that others wrote, such as documents, file names and languages, made harmless for where it is printed.

    PlainConsole   tables and sequences on a terminal
    pictures       a text of several lines: control characters as their pictures
    label          a name in a plot, where matplotlib reads mathematics

A sentence or a name on a line of its own is `conf.errors.visible`. HTML is escaped by Jinja and html.escape.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from conf.errors import visible

REPLACEMENT = 0xFFFD
# No text may steer a terminal: tab and line end are the only control characters that reach it. Halves of
# surrogate pairs cannot be printed at all.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), REPLACEMENT)
_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), REPLACEMENT)


def pictures(text: str) -> str:
    """Return the text with its lines, and with a picture for every control character; each is one character."""
    return text.translate(_PICTURES)


def label(text: str) -> str:
    """Return the text as matplotlib draws it letter by letter: a pair of dollars would be mathematics."""
    return visible(text).replace("$", r"\$")


def print_line(sentence: str, *, error: bool = False) -> None:
    """Print a sentence on a line of its own, to standard output or error."""
    print(visible(sentence), file=sys.stderr if error else sys.stdout, flush=True)


def speed(rate: float) -> str:
    """Return tokens per second in words: 0.42 tokens/s, 25 tokens/s, 10,700 tokens/s."""
    return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.2g} tokens/s"


def place() -> tuple[int, int, int]:
    """Return torchrun's rank, world size and local rank; 0, 1 and 0 without it."""
    # Schedulers set WORLD_SIZE and RANK for jobs of their own kinds too.
    if "TORCHELASTIC_RUN_ID" not in os.environ and "LOCAL_RANK" not in os.environ:
        return 0, 1, 0
    get = os.environ.get
    return int(get("RANK", 0)), int(get("WORLD_SIZE", 1)), int(get("LOCAL_RANK", 0))


def print_once(sentence: str, *, error: bool = False) -> None:
    """Print as print_line does, in the first of torchrun's processes alone."""
    if not place()[0]:
        print_line(sentence, error=error)


class PlainConsole(Console):
    """Rich's console for text that others wrote: nothing in a string, a title or a cell is markup, the name of
    an emoji or a terminal's command. Colours are given as Text and Style.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Replace control characters: every string that rich prints comes through here."""
        return super().render_str(pictures(text), **options)

    def table(
        self,
        title: str,
        heads: Iterable[str],
        rows: Iterable[Sequence[str]],
        *,
        names: int = 1,
    ) -> None:
        """Print a table of texts: `names` columns of names, then columns of figures."""
        self.print(f"\n{title}", soft_wrap=True, style="bold")
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for index, head in enumerate(heads):
            justify: JustifyMethod = "left" if index < names else "right"
            table.add_column(head, justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.print(table)
