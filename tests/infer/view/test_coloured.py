"""Texts coloured by the source of each token: on a terminal, on a page, and for eyes of every kind."""

import io
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from infer import TextStep
from infer.view.coloured import INKS, KINDS, legend, meaning, write_page
from infer.view.live import Summary, View

STEPS = [
    TextStep(0, [1], 0, 0, False, ["x"]),
    TextStep(0, [2, 3, 4, 5], 4, 3, False, ["  ", "=\n  ", "y", "z"], sources=("text", "ngrams", "ngrams")),
    TextStep(0, [6, 7], 2, 1, True, ["a", "b"], sources=("adaptive",)),
]
# How linear RGB is seen without the cones for red or green (Machado et al. 2009).
EYES = {
    "all cones": np.eye(3),
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    """Return linear RGB of #rrggbb."""
    part = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def contrast(ink: str, paper: str) -> float:
    """Return the contrast ratio of WCAG."""
    dark, light = sorted(float(XYZ[1] @ linear(colour)) for colour in (ink, paper))
    return (light + 0.05) / (dark + 0.05)


def lab(colour: str, eye: str) -> np.ndarray:
    """Return CIE L*a*b* of a colour as an eye sees it."""
    white = XYZ @ np.ones(3)
    x, y, z = np.cbrt(XYZ @ np.clip(np.array(EYES[eye]) @ linear(colour), 1e-6, 1) / white)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark", "strong"])
def test_colours_are_readable_and_apart_for_every_eye(scheme: str) -> None:
    """The sources of one text, and the two kinds of a graph's drafts, differ by more than 20, where 1 is just
    seen; ink on any of them has the contrast of 4.5 that WCAG asks for.
    """
    ink = "#000000" if scheme == "strong" else INKS[scheme][0]
    colours = {name: getattr(kind, scheme) for name, kind in KINDS.items()}
    assert all(contrast(ink, colour) >= 4.5 for colour in colours.values())
    together = [*combinations(("adaptive", "text", "ngrams"), 2), ("drafted", "shared")]
    for eye in EYES:
        for one, other in together:
            apart = np.linalg.norm(lab(colours[one], eye) - lab(colours[other], eye))
            assert apart > 20, (eye, one, other)


def test_a_terminal_paints_what_was_drafted_white_space_too() -> None:
    """Letters alone had a colour, and spaces showed nothing. A painted line's end would paint the next line."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=120)
    view, summary = View(console, ""), Summary(began=0.0)
    for step in STEPS:
        view.step(step)
        summary.add(step)
    view.close(summary)
    text, ngrams = "\x1b[30;43m", "\x1b[4;30;46m"
    shown = file.getvalue()
    assert f"x{text}  \x1b[0m{ngrams}=\x1b[0m\n{ngrams}  \x1b[0m" in shown
    assert meaning("ngrams") in shown and meaning("drafted") not in shown  # the legend has what was there
    assert "67 % of 6 drafts accepted (adaptive 25 %, text 25 %, n-grams 50 %)" in " ".join(shown.split())


def test_a_page_has_a_class_for_each_source(tmp_path: Path) -> None:
    summary = Summary(began=0.0)
    summary.add(STEPS[0])
    write_page(tmp_path / "p.html", title="", before="", after="", steps=STEPS, summary=summary)
    page = (tmp_path / "p.html").read_text()
    assert '<span class="text">  </span><span class="ngrams">=\n  y</span>z' in page
    assert '<span class="adaptive">a</span>b' in page and meaning("shared") not in page
    assert page.count("<span") == page.count("</span>")
    assert [kind in legend({"own", "text"}) for kind in ("given", "own", "text", "ngrams")] == [True] * 3 + [
        False
    ]
