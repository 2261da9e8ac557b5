from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from conf import UserError, settings
from infer import speed
from infer.checkpoint import Adaptive
from infer.config import SpeedConfig
from infer.measure import Measured, Run, measure
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


def test_every_round_counts() -> None:
    """Outputs, acceptance and tokens per forward were the first round's alone: a policy that drafts
    otherwise in the second one was never compared, and its rate stood beside another's acceptance.
    """
    plain = Measured([[Run([1, 2, 3, 4], 1.0, 4, 0, 0)] * 2] * 2)
    right, wrong = Run([1, 2, 3, 4], 1.0, 3, 4, 1), Run([1, 2, 3, 5], 1.0, 1, 4, 3)
    found = Measured([[right, right], [right, wrong]])
    assert [ours == theirs for ours, theirs in zip(found.outputs, plain.outputs)] == [True, False]
    assert found.acceptance_rate == 6 / 16 and found.tokens_per_forward == 16 / 10
    rows = speed._rows(
        {speed.Key("float32", "plain", 0): plain, speed.Key("float32", "auto", 3): found}, prompt_set="a"
    )
    assert [(row["identical"], row["prompts"], row["tokens"]) for row in rows] == [(2, 2, 16), (1, 2, 16)]


def test_a_lossy_report_fails_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written before the check, and the second run said "nothing to do" and succeeded."""
    lossy = [row | {"identical": 3} if row["decoder"] == "sdsat" else row for row in ROWS]
    monkeypatch.setattr(speed, "load_adaptive", lambda folder: Adaptive((6,), 3))
    monkeypatch.setattr(speed, "compare", lambda config, ids: lossy)
    config = settings(
        "speed",
        SpeedConfig,
        [
            "experiment=demo",
            "model=absent",
            "draft=absent",
            "prompts.held_out.path=absent",
            f"out={tmp_path}",
            "tracker.mode=disabled",
        ],
    )
    for _ in range(2):
        with pytest.raises(UserError, match="float32 outputs: wanted all identical .* sdsat k=2 on held_out"):
            speed.main(config)
        assert (tmp_path / "manifest.json").is_file()
        monkeypatch.setattr(speed, "compare", None)


def test_measured_figures_are_those_of_the_runs() -> None:
    plain = Measured([[Run([1, 2, 3, 4], 4.0, 4, 0, 0)] * 2, [Run([1, 2, 3, 4], 2.0, 4, 0, 0)] * 2])
    drafted = Measured([[Run([1, 2, 3, 4], 2.0, 2, 6, 3)] * 2, [Run([1, 2, 3, 4], 2.0, 2, 6, 3)] * 2])
    assert plain.tokens_per_second == [1.0, 2.0]
    assert drafted.speedups(plain) == [2.0, 1.0]
    assert plain.acceptance_rate is None and drafted.acceptance_rate == 0.5
    assert (plain.tokens_per_forward, drafted.tokens_per_forward) == (1.0, 2.0)


def test_decoders_take_turns_after_a_warm_up() -> None:
    calls: list[tuple[str, int]] = []

    def decoder(name: str):
        def run(prompt) -> Run:
            calls.append((name, prompt[0]))
            return Run([0], 1.0, 1, 0, 0)

        return run

    done = []
    found = measure(
        {"a": decoder("a"), "b": decoder("b")}, [[1], [2]], rounds=2, advance=lambda: done.append(1)
    )
    assert calls[:2] == [("a", 1), ("b", 1)]  # warm-up, uncounted
    assert calls[2:] == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert len(done) == 4 and [len(r) for r in found["a"].rounds] == [2, 2]
