"""Pages that need nothing but themselves: one style, colours of a light and a dark theme, plots as inline SVG.

A plot is drawn once, in the light theme's colours; in its SVG they become variables of the style, so that it
follows the theme of the page. Its texts stay texts, in the page's font.
"""

import io
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.characters import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEME = {  # light and dark; no two light ones are equal
    "ink": ("#1f2328", "#e6edf3"),
    "paper": ("#ffffff", "#0d1117"),
    "faint": ("#656d76", "#8d96a0"),
    "edge": ("#d1d9e0", "#30363d"),
    "panel": ("#f6f8fa", "#161b22"),
    "accent": ("#0969da", "#58a6ff"),
    "good": ("#1a7f37", "#57ab5a"),
    "warn": ("#9a6700", "#d29922"),
    "warn-paper": ("#fff8c5", "#2b2410"),
    "blue": ("#0072b2", "#56b4e9"),
    "indigo": ("#4b3fb0", "#a5a0ff"),
    "orange": ("#d55e00", "#ff8f4d"),
    "wine": ("#882255", "#e879a9"),
    "brown": ("#8c6d31", "#c9a45c"),
    "sky": ("#3a94c9", "#7cc7f2"),
    "green": ("#00805e", "#2fbf95"),
    "purple": ("#b0589a", "#dd95c3"),
    "gold": ("#a86f00", "#f0b429"),
    "grey": ("#57606a", "#9aa4ae"),
    "silver": ("#8b949e", "#6e7681"),
}
LIGHT = {name: light for name, (light, _) in THEME.items()}
STYLE_FILE = Path(__file__).with_name("page.css")


def variables(names: Mapping[str, tuple[str, str]]) -> str:
    """Return colours of both themes as variables of CSS."""
    light, dark = (" ".join(f"--{name}: {pair[at]};" for name, pair in names.items()) for at in (0, 1))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def page(title: str, body: str, *, style: str = "") -> str:
    """Return an HTML page of this body, which is markup already; `style` are further rules."""
    rules = "\n".join([variables(THEME), STYLE_FILE.read_text(encoding="utf-8"), style])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<style>
{rules}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def plot_style() -> AbstractContextManager[Any]:
    """Around the drawing of a figure: the light theme's colours, and sizes to be read on a phone."""
    from cycler import cycler
    from matplotlib import rc_context

    inks = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), LIGHT["ink"])
    lines = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["faint"])
    sizes = {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    spines = {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    grid = {"axes.grid": True, "grid.color": LIGHT["edge"], "grid.linewidth": 0.6}
    cycle = {"axes.prop_cycle": cycler(color=[LIGHT["grey"]])}  # of what has no colour of its own
    return rc_context(inks | lines | sizes | spines | grid | cycle)  # type: ignore[arg-type]


def inline_svg(figure: "Figure", name: str) -> str:
    """Return a figure that was drawn in `plot_style` as markup of a page, which follows its theme.

    `name` says what it shows, to a screen reader too, and no other figure of the page may have it.
    """
    box, inner = _parts(figure, name, THEME)
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(pictures(name))}">{inner}'


def svg_file(figure: "Figure", title: str, colours: Mapping[str, tuple[str, str]]) -> str:
    """Return a figure as an SVG file that scales to its window and follows the viewer's theme.

    `colours` are further ones of both themes, beside THEME's.
    """
    both = {**THEME, **colours}
    box, inner = _parts(figure, title, both)
    width = float(box.split()[2])
    return f"""<?xml version="1.0" encoding="utf-8"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}" role="img">
<title>{escape(pictures(title))}</title>
<style>{variables(both)}
svg {{ width: 100%; max-width: {width:.0f}pt; height: auto; background: var(--paper); }}</style>
{inner}
"""


def _parts(figure: "Figure", name: str, colours: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the box of a figure's SVG, and what is in it with the end of its tag, its colours as variables."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": pictures(name)}):
        nothing: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None
    inner = text[text.index(">", box.end()) + 1 :]
    inner = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", inner, flags=re.DOTALL)
    inner = re.sub(r'<g id="[^"]*"', "<g", inner)  # matplotlib numbers these alike in every figure
    for variable, (light, _) in colours.items():
        inner = inner.replace(light, f"var(--{variable})")
    return box[1], inner
