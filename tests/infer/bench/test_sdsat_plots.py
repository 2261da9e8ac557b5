"""Test the plots over k as in SDSAT's figures."""

from typing import Any
from xml.etree import ElementTree

from conf.pages import svg
from infer.bench.sdsat_plots import points, sdsat_draws


def row(decoder: str, acceptance: float | None, rate: float) -> dict[str, Any]:
    return {
        "prompt_set": "humaneval",
        "temperature": 0.0,
        "decoder": decoder,
        "acceptance_rate": acceptance,
        "output_tokens_per_second": rate,
    }


ROWS = [
    row("plain", None, 30.0),
    row("hybrid", 0.5, 90.0),
    row("sdsat k=13", 0.25, 100.0),
    row("sdsat k=1", 0.75, 50.0),
]


def test_a_line_has_the_figures_of_each_k_in_order() -> None:
    assert points(ROWS, "acceptance_rate") == {"T=0": [(1, 0.75), (13, 0.25)]}
    rates = points(ROWS, "output_tokens_per_second")
    assert rates == {"T=0": [(0, 30.0), (1, 50.0), (13, 100.0)]}


def test_plots_are_svg_and_need_more_than_one_k() -> None:
    draws = sdsat_draws(ROWS)
    assert list(draws) == [
        "Acceptance rate by k: humaneval",
        "Tokens per second by k: humaneval",
    ]
    for title, draw in draws.items():
        text = svg(draw, title)
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert text == svg(draw, title)
    assert not sdsat_draws(ROWS[:3])
