"""The report's plots: what is drawn, as matplotlib holds it, and as markup of the page."""

import re

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from conf.html import LIGHT, THEME, plot_style
from data_prep.inspect import COLOURS
from infer.graph.picture import COLOURS as NODES
from infer.report.plots import (
    PLOTS,
    STYLES,
    Panel,
    acceptance_by_place,
    draw,
    scores,
    speedups,
    time_of_rows,
    training_curves,
)
from infer.view import KINDS
from tests.infer.report import report_fixture as fixture
from tests.infer.test_view import contrast


def drawn(panel: Panel):
    """The panel's axis."""
    with plot_style():
        axis = Figure().subplots()
        panel.draw(axis)
    return axis


def test_every_panel_shows_its_whole_curve() -> None:
    """The first panel fixed the shared axis, and the second's higher curve was cut off."""
    speed = fixture.speed(sets=("spec_bench", "humaneval"))
    panels = PLOTS["tokens_per_second"].panels(speed)
    assert [panel.title for panel in panels] == ["spec bench", "humaneval"]
    highest = max(row["tokens_per_second"] for row in speed["rows"] if not row["peer"])
    for axis in map(drawn, panels):
        low, high = axis.get_ylim()
        assert low == 0 and high > highest
        # The paper's curve for each temperature, and the levels of plain, adaptive, auto and gsd.
        assert len(axis.lines) == 3 * 5
        assert sum(len(line.get_xdata()) == len(fixture.KS) for line in axis.lines) == 3


def test_a_type_has_panels_of_its_own() -> None:
    speed = fixture.speed(sets=("humaneval", "infilling"), dtypes=("bfloat16", "float32"), temperatures=(0.0,))
    titles = ["humaneval, bfloat16", "infilling, bfloat16", "humaneval, float32", "infilling, float32"]
    assert [panel.title for panel in acceptance_by_place(speed)] == titles


def test_a_decoder_has_one_colour_everywhere() -> None:
    speed = fixture.speed(sets=("humaneval",), temperatures=(0.0,))
    (curves,), (bars,) = map(drawn, acceptance_by_place(speed)), map(drawn, speedups(speed))
    lines = {item.get_label(): to_hex(item[0].get_color()) for item in curves.containers}
    names = [text.get_text() for text in bars.get_yticklabels()]
    filled = dict(zip(names, (to_hex(patch.get_facecolor()) for patch in bars.patches)))
    for name, decoder in (("sdsat", "auto"), ("n-grams only", "ngrams"), ("gsd", "gsd")):
        assert lines[name] == filled[name] == LIGHT[STYLES[decoder][0]]
    colors = [color for color, _ in STYLES.values()]
    assert len(set(colors)) == len(colors) - 1  # plain decoding of the base model is plain decoding


def test_places_that_few_drafts_reached_are_left_out() -> None:
    """The right ends of the curves, of a handful of drafts, rose to 100 % and fell to 0 again."""
    speed = fixture.speed(sets=("humaneval",), temperatures=(0.0,))
    for row in speed["rows"]:
        row["reached"] = [20] * 4 + [19] * 16
    (axis,) = map(drawn, acceptance_by_place(speed))
    assert max(max(item[0].get_xdata()) for item in axis.containers) < 4.6


def test_what_was_not_measured_is_not_drawn() -> None:
    speed = fixture.speed(sets=("humaneval",))
    alone = speed | {"rows": speed["rows"][:1]}
    assert time_of_rows(speed | {"limits": [], "costs": []}) == []
    for plot in (plot for plot in PLOTS.values() if plot.part == "speed" and plot.panels is not time_of_rows):
        assert plot.panels(alone) == []
    nothing = [row | {"value": 0.0} for row in fixture.quality()["rows"]]
    assert scores({"rows": []}) == scores({"rows": nothing}) == []  # bars of length 0 with their intervals
    assert training_curves({"log": [], "validation": []}) == []


def test_a_plot_follows_the_theme_of_its_page() -> None:
    """No colour is left in the markup but variables of the style, and no id but those that are referred to."""
    report = {"speed": fixture.speed(), "quality": fixture.quality(), "training": fixture.training()}
    drawings = draw(report)
    assert drawings.keys() == PLOTS.keys()
    markup = "".join(panel for item in drawings.values() for panel in (*item.panels, item.legend))
    assert not re.findall(r"#[0-9a-f]{6}\b", markup)
    assert set(re.findall(r"var\(--([a-z-]+)\)", markup)) <= THEME.keys()
    ids = re.findall(r' id="([^"]*)"', markup)
    assert len(ids) == len(set(ids)) and set(re.findall(r'(?:url\(#|href="#)([^")]*)', markup)) <= set(ids)
    assert all(item.png.startswith(b"\x89PNG") for item in drawings.values())


@pytest.mark.parametrize("dark", [False, True])
def test_texts_and_lines_are_seen_in_both_themes(dark: bool) -> None:
    """WCAG AA: 4.5 of a text and its background, 3 of a line of a plot."""
    theme = {name: pair[dark] for name, pair in THEME.items()}
    texts = [(ink, paper) for ink in ("ink", "faint", "accent", "good", "warn") for paper in ("paper", "panel")]
    for ink, paper in (*texts, ("ink", "warn-paper")):
        assert contrast(theme[ink], theme[paper]) >= 4.5, (ink, paper)
    pairs = [*COLOURS.values(), *(pair for name, pair in NODES.items() if name != "line")]
    for background in (
        *(pair[dark] for pair in pairs),
        *((kind.light, kind.dark)[dark] for kind in KINDS.values()),
    ):
        assert contrast(theme["ink"], background) >= 4.5, background
    assert contrast(NODES["line"][dark], theme["paper"]) >= 3
    for name in {color for color, _ in STYLES.values()} | {"silver"}:
        assert contrast(theme[name], theme["paper"]) >= 3, name
