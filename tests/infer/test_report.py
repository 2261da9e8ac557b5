from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from infer.report.old import plot, print_report, summarise


def row(prompt_set: str, dtype: str, decoder: str, k: int, rate: float, speedup: float) -> dict:
    return {
        "decoder": decoder,
        "k": k,
        "dtype": dtype,
        "prompt_set": prompt_set,
        "tokens_per_second": rate,
        "speedup": speedup,
        "speedup_over_fastest_plain": rate / 120,
        "fastest_plain_dtype": "float32",
        "acceptance_rate": 0.5 if k else None,
        "tokens_per_forward": 1.5,
        "identical": 4,
        "prompts": 4,
    }


ROWS = [
    row("humaneval", "bfloat16", "plain", 0, 100, 1.0),
    row("humaneval", "bfloat16", "sdsat", 2, 150, 1.5),
    row("humaneval", "float32", "plain", 0, 120, 1.0),
    row("humaneval", "float32", "sdsat", 2, 130, 1.1),
    row("held_out", "bfloat16", "plain", 0, 100, 1.0),
    row("held_out", "bfloat16", "sdsat", 2, 150, 1.5),
    row("held_out", "bfloat16", "sdsat", 4, 180, 1.8),
    row("held_out", "float32", "plain", 0, 120, 1.0),
    row("held_out", "float32", "sdsat", 2, 160, 1.3),
]


def test_the_best_k_is_held_against_plain_decoding_in_its_fastest_dtype() -> None:
    best = summarise(ROWS)["held_out"]
    assert (best["k"], best["dtype"], best["fastest_plain_dtype"]) == (4, "bfloat16", "float32")
    assert best["speedup_over_fastest_plain"] == pytest.approx(1.5)
    assert best["acceptance_rate"] == 0.5


def test_every_panel_shows_its_whole_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first panel fixed the shared axis, and the second's higher curve was cut off."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    plot(ROWS, "tokens_per_second", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    for axis in kept[0].axes:
        low, high = axis.get_ylim()
        assert low == 0 and high > 180
    monkeypatch.undo()
    plt.close(kept[0])


def test_the_table_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """The row of "sdsat auto" cut the last column's title."""
    machine = {"cpu": "a processor", "gpu": None, "threads": 1}
    rows = [
        *ROWS,
        row("held_out", "float32", "auto", 12, 1630, 1.2),
        row("held_out", "float32", "sdsat", 12, 9, 1),
    ]
    print_report({"hardware": machine, "rows": rows, "summary": summarise(ROWS)})
    printed = capsys.readouterr().out
    assert "sdsat k=12" in printed and "identical" in printed and "…" not in printed
    assert "1.80x plain decoding" in printed


def test_texts_too_short_for_drafts_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With max_new_tokens=2 nothing is drafted, and the report of what had been measured was lost to
    "max() arg is an empty sequence".
    """
    rows = [row | {"acceptance_rate": None, "prompt_set": "short"} for row in ROWS[:4]]
    assert summarise(rows) == {} and summarise(rows + ROWS).keys() == {"humaneval", "held_out"}
    plot(rows, "acceptance_rate", tmp_path / "plot.png")
    machine = {"cpu": "a processor", "gpu": None, "threads": 1}
    print_report({"hardware": machine, "rows": rows, "summary": {}})
    printed = capsys.readouterr().out
    assert "sdsat k=2" in printed and "short: the texts were too short for drafts." in printed
