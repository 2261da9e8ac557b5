"""Test a report's summary: its sentence and cells, and the meanings of the columns on the page."""

from pathlib import Path
from typing import Any

import pytest

from infer.bench.marks import BUSY
from infer.bench.summary import Summary, summarize
from infer.bench.tables import MEANINGS

DOCS = Path(__file__).parents[3] / "docs"
Row = dict[str, Any]


def row(decoder: str, speedup: float, forward: float, **changed: Any) -> Row:
    return {
        "decoder": decoder,
        "prompt_set": "humaneval",
        "temperature": 0.0,
        "speedup": speedup,
        "speedup_interval": [0.9 * speedup, 1.1 * speedup],
        "tokens_per_forward": forward,
        "mean_acceptance_length": 1 + forward,
        "same": 8,
        "compared": 8,
        "marks": [],
    } | changed


def speed(*rows: Row, dtype: str = "float32", gated: bool = False) -> Row:
    plain = row("plain", 1.0, 1.0, speedup_interval=None, same=0, compared=0)
    again = row("plain, again", 1.01, 1.0)
    others = [row("base, plain", 9.0, 1.0), row("hf generate", 9.0, 1.0)]
    part = {"rows": [plain, again, *others, *rows], "settings": {"dtype": dtype}}
    return {"speed": part | {"gated": gated}, "quality": None}


def summary_of(report: Row) -> Summary:
    summary = summarize(report)
    assert summary
    return summary


def cells_of(report: Row) -> dict[str, tuple[str, str]]:
    cells = summary_of(report).cells
    return {cell.name: (cell.figure, cell.note) for cell in cells}


def test_the_fastest_of_the_models_own_decoders_is_named() -> None:
    report = speed(row("ngrams", 1.5, 2.5), row("hybrid", 2.0, 2.4))
    assert summary_of(report).sentence == (
        "hybrid is 2.00 times as fast (95 %: 1.80–2.20) as plain decoding on humaneval, "
        "with 2.40 tokens per forward; 8 of 8 texts are the same."
    )
    cells = cells_of(report)
    assert list(cells) == [
        "best decoder",
        "tokens per forward",
        "equal texts",
        "quality",
    ]
    assert cells["best decoder"][0] == "hybrid"
    assert cells["tokens per forward"][0] == "2.40"
    assert cells["equal texts"][0] == "8 of 8"
    assert cells["quality"][0] == "not measured"


def test_a_busy_machine_has_no_speed_to_tell() -> None:
    """The decoder with the most tokens per forward is named: counts do not change."""
    marked = {"marks": [BUSY]}
    report = speed(row("ngrams", 1.5, 2.5, **marked), row("hybrid", 9.0, 2.4, **marked))
    summary = summary_of(report)
    assert "busy" in summary.sentence and "ngrams has 2.50" in summary.sentence
    assert not any(
        "9.0" in text for cell in summary.cells for text in vars(cell).values()
    )
    assert not any("times" in cell.note for cell in summary.cells)


def test_an_interval_with_1_is_no_gain() -> None:
    sentence = summary_of(speed(row("hybrid", 1.05, 1.2))).sentence
    assert sentence.startswith("hybrid is not significantly faster than plain decoding")


def test_several_prompt_sets_have_the_range() -> None:
    other = row("hybrid", 1.5, 10.0, prompt_set="chat")
    report = speed(row("hybrid", 2.0, 2.4), other)
    assert summary_of(report).sentence == (
        "hybrid is 1.50 to 2.00 times as fast as plain decoding on 2 prompt sets, "
        "with 2.40 to 10.00 tokens per forward; 16 of 16 texts are the same."
    )


def test_texts_that_differ_in_a_narrow_type_have_their_reason() -> None:
    report = speed(row("hybrid", 2.0, 2.4, same=7), dtype="bfloat16")
    figure, note = cells_of(report)["equal texts"]
    assert figure == "7 of 8" and "in bfloat16 near-ties may differ" in note


@pytest.mark.parametrize("gated", [True, False])
def test_quality_is_that_of_the_named_decoder_and_of_the_base(gated: bool) -> None:
    def score(who: str, decoder: str, value: float) -> Row:
        place = {"benchmark": "humaneval", "metric": "pass@1", "value": value}
        return {"who": who, "decoder": decoder} | place

    report = speed(row("hybrid", 2.0, 2.4), gated=gated)
    rows = [score("model", "plain", 0.3), score("model", "hybrid", 0.25)]
    report["quality"] = {"rows": [*rows, score("base", "plain", 0.2)]}
    figure, note = cells_of(report)["quality"]
    assert figure == ("unchanged base model" if gated else "measured")
    assert note == "pass@1 of humaneval 25.0 %, before fine-tuning 20.0 %"


def test_without_a_drafting_decoder_there_is_no_summary() -> None:
    assert summarize(speed()) is None
    assert summarize({"speed": None, "quality": None}) is None


def test_columns_mean_the_same_on_the_page_and_in_the_docs() -> None:
    docs = (DOCS / "reading_the_report.md").read_text(encoding="utf-8")
    for columns in MEANINGS.values():
        for head, meaning in columns.items():
            assert f"| {head} | {meaning} |" in docs
