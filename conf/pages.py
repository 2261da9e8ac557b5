"""Render HTML pages with inline SVG plots, without scripts or links to other files.

Plots take the colour of the page's text, so that they fit a light and a dark page.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")
WIDTH, HEIGHT = 4.2, 3.0  # inches
INK = "#010203"  # placeholder, replaced by the page's text colour
# Okabe and Ito's colours except yellow and black, which are faint on white or on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
LINES = ("-", "--", ":")  # the next one after a line of each colour
INKED = (
    "text.color",
    "axes.edgecolor",
    "axes.labelcolor",
    "xtick.color",
    "ytick.color",
)
STYLE: dict[Any, Any] = dict.fromkeys(INKED, INK) | {
    "axes.prop_cycle": cycler(linestyle=LINES) * cycler(color=COLOURS),
    "axes.facecolor": "none",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 8,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
NUMBERED = re.compile(r' id="[A-Za-z0-9.]+_\d+"')  # ids that no element refers to
Draw = Callable[[Axes], None]


@dataclass(frozen=True)
class Cell:
    """A figure with its name and a note; parts.html.j2 shows it as a card."""

    name: str
    figure: str
    note: str


def svg(draw: Draw, title: str, *, height: float = HEIGHT) -> str:
    """Return a plot as an SVG element; equal plots give equal text.

    The ids in it are derived from a hash of the title, so that several plots fit on a page.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=NO_METADATA)
    text = file.getvalue()
    text = NUMBERED.sub("", text[text.index("<svg") :])
    # A screen reader reads the title in place of every number on the axes.
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    return text.replace(INK, "currentColor")


def short_path(folder: str | Path) -> str:
    """Return a folder's name after its parent's: a last name such as "model" identifies nothing."""
    return str(Path(*Path(folder).resolve().parts[-2:]))


def render(template: Path, **values: Any) -> str:
    """Render a Jinja template, which may extend conf's layout.html.j2, as a page."""
    folders = [template.parent, Path(__file__).parent]
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)
