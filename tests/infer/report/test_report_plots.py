"""The report's plots: what is drawn, as matplotlib holds it."""

from matplotlib.colors import to_hex

from infer.report.bars import scores, speedup_by_set
from infer.report.curves import acceptance_by_position, rate_against_k, time_of_rows
from infer.report.palette import COLORS
from tests.infer.report import report_fixture as fixture


def test_every_panel_shows_its_whole_curve() -> None:
    """The first panel fixed the shared axis, and the second's higher curve was cut off."""
    speed = fixture.speed(sets=("spec_bench", "humaneval"))
    figure = rate_against_k(speed)
    assert figure is not None and [axis.get_title() for axis in figure.axes] == ["spec bench", "humaneval"]
    highest = max(row["tokens_per_second"] for row in speed["rows"] if not row["peer"])
    for axis in figure.axes:
        low, high = axis.get_ylim()
        assert low == 0 and high > highest
        # The paper's curve for each temperature, and the levels of plain, adaptive, auto and gsd.
        assert len(axis.lines) == 3 * 5 and len(axis.lines[0].get_xdata()) == len(fixture.KS)


def test_a_type_has_its_own_row_of_panels() -> None:
    figure = (
        rate_against_k(fixture.speed(sets=("a", "humaneval"), dtypes=("bfloat16", "float32")))
        if False
        else None
    )
    speed = fixture.speed(sets=("humaneval", "infilling"), dtypes=("bfloat16", "float32"), temperatures=(0.0,))
    figure = acceptance_by_position(speed)
    assert figure is not None
    titles = ["humaneval, bfloat16", "infilling, bfloat16", "humaneval, float32", "infilling, float32"]
    assert [axis.get_title() for axis in figure.axes] == titles


def test_a_decoder_has_one_colour_everywhere() -> None:
    speed = fixture.speed(sets=("humaneval",))
    curves, bars = acceptance_by_position(speed), speedup_by_set(speed)
    assert curves is not None and bars is not None
    drawn = {line.get_label(): to_hex(line.get_color()) for line in curves.axes[0].lines}
    containers = [one for one in bars.axes[0].containers if hasattr(one, "patches")]
    colors = {one.get_label(): to_hex(one.patches[0].get_facecolor()) for one in containers}
    filled = {name.removesuffix(" k=*"): color for name, color in colors.items()}
    for name, decoder in (("sdsat", "auto"), ("n-grams only", "ngrams"), ("gsd", "gsd"), ("vllm", "vllm")):
        assert drawn[name] == filled[name] == COLORS[decoder]
    assert len(set(COLORS.values())) == len(COLORS) - 1  # plain decoding of the base model is plain decoding


def test_intervals_and_the_line_at_one() -> None:
    figure = speedup_by_set(fixture.speed())
    assert figure is not None
    (axis,) = figure.axes
    bars = [container for container in axis.containers if hasattr(container, "patches")]
    assert all(bar.errorbar.has_yerr and len(bar.patches) == 3 for bar in bars)
    assert any(set(line.get_ydata()) == {1} for line in axis.lines)


def test_what_was_not_measured_is_not_drawn() -> None:
    speed = fixture.speed(sets=("humaneval",))
    assert time_of_rows(speed | {"limits": [], "costs": []}) is None
    assert rate_against_k(speed | {"rows": speed["rows"][:1]}) is None
    assert speedup_by_set(speed | {"rows": speed["rows"][:1]}) is None
    assert acceptance_by_position(speed | {"rows": speed["rows"][:1]}) is None
    assert scores({"rows": []}) is None
