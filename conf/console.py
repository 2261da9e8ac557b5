"""Print untrusted text, such as documents and file names, without control sequences or markup.

    PlainConsole   tables and sequences on a terminal
    pictures       replace control characters in a text of several lines by Unicode pictures
    label          escape a name for a matplotlib plot

`conf.errors.visible` escapes a message of one line. Jinja and html.escape escape HTML.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from conf.errors import visible

REPLACEMENT = 0xFFFD
WIDEST = 10_000  # columns of the widest table
# Only tab and newline reach the terminal as control characters. Lone surrogates cannot be printed at all.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), REPLACEMENT)
_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), REPLACEMENT)


def pictures(text: str) -> str:
    """Replace each control character except tab and newline by one printable character."""
    return text.translate(_PICTURES)


def label(text: str) -> str:
    """Escape a text for matplotlib, which would read a pair of dollar signs as mathematics."""
    return visible(text).replace("$", r"\$")


def print_line(sentence: str, *, error: bool = False) -> None:
    """Print a message as one line, to standard output or standard error."""
    print(visible(sentence), file=sys.stderr if error else sys.stdout, flush=True)


def speed(rate: float) -> str:
    """Format tokens per second: 0.42 tokens/s, 25 tokens/s, 10,700 tokens/s."""
    return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.2g} tokens/s"


def format_duration(seconds: float) -> str:
    """Format a duration: 42 s, 12 min, 3 h 5 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return (
        f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
    )


def torchrun_rank() -> tuple[int, int, int]:
    """Return the rank, world size and local rank under torchrun; (0, 1, 0) without it."""
    # Schedulers set WORLD_SIZE and RANK for other jobs too.
    if "TORCHELASTIC_RUN_ID" not in os.environ and "LOCAL_RANK" not in os.environ:
        return 0, 1, 0
    get = os.environ.get
    return int(get("RANK", 0)), int(get("WORLD_SIZE", 1)), int(get("LOCAL_RANK", 0))


def print_once(sentence: str, *, error: bool = False) -> None:
    """Print a line as `print_line` does, on rank 0 only."""
    if not torchrun_rank()[0]:
        print_line(sentence, error=error)


class PlainConsole(Console):
    """Rich console for untrusted text: strings, titles and cells are printed without markup, emoji names or
    terminal commands. Use Text and Style for colours.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Replace control characters; rich passes every string that it prints through this method."""
        return super().render_str(pictures(text), **options)

    def table(
        self,
        title: str,
        heads: Iterable[str],
        rows: Iterable[Sequence[str]],
        *,
        names: int = 1,
    ) -> None:
        """Print a table: the first `names` columns are left-aligned names, the rest right-aligned figures.

        A table that is wider than the terminal, or than the 80 columns of a pipe, is printed in full.
        """
        self.print(f"\n{title}", soft_wrap=True, style="bold")
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for index, head in enumerate(heads):
            justify: JustifyMethod = "left" if index < names else "right"
            table.add_column(head, justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        unlimited = self.options.update_width(WIDEST)
        table.width = Measurement.get(self, unlimited, table).maximum
        self.print(table, soft_wrap=True)
