"""Test the comparison of reports: a table for each prompt set, a table of scores, errors."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from conf.errors import UserError
from conf.runs.files import with_checksum, write_json
from conf.settings.compose import settings
from infer.bench.compare import CompareConfig, main
from infer.bench.comparison import (
    mark_notes,
    model_tables,
    prompt_warnings,
    speed_tables,
)
from infer.bench.marks import BUSY
from infer.bench.report import read_parts
from tests.infer.bench.test_summary import row, speed

Row = dict[str, Any]


def score(who: str, value: float) -> Row:
    return {
        "benchmark": "humaneval",
        "metric": "pass@1",
        "decoder": "plain",
        "who": who,
        "value": value,
    }


def reports() -> dict[str, Row]:
    cells = {"output_tokens_per_second": 25.0, "first_token_ms": 90.0}
    result = {}
    for name, gain in (("gated", 2.0), ("dual", 1.25)):
        report = speed(row("hybrid", gain, 2 * gain))
        for each in report["speed"]["rows"]:
            each.update(cells)
            if each["decoder"] != "hybrid":
                each["mean_acceptance_length"] = None
        report["quality"] = {"rows": [score("model", gain / 10), score("base", 0.1)]}
        result[name] = report
    return result


def test_models_share_the_table_of_a_prompt_set() -> None:
    (table,) = speed_tables(reports())
    assert table.title == "humaneval, greedy"
    named = [(cells[0], cells[1], cells[4]) for cells in table.rows]
    assert named == [
        ("gated", "plain", "1.00"),
        ("", "base, plain", "9.00"),
        ("", "hf generate", "9.00"),
        ("", "hybrid", "2.00"),
        ("dual", "plain", "1.00"),
        ("", "base, plain", "9.00"),
        ("", "hf generate", "9.00"),
        ("", "hybrid", "1.25"),
    ]
    assert all(len(cells) == len(table.heads) for cells in table.rows)


def test_all_figures_have_a_column_for_each_model_and_base() -> None:
    compared = reports()
    loss = {**score("model", 1.5394), "benchmark": "held_out", "metric": "loss"}
    compared["dual"]["quality"]["rows"].append(loss)
    sampled = {**compared["dual"]["speed"]["rows"][-1], "temperature": 1.0}
    compared["dual"]["speed"]["rows"].append(sampled)
    (table,) = model_tables(compared)
    assert table.heads[3:] == ("gated", "gated: base", "dual", "dual: base")
    assert table.rows == [
        ["humaneval", "pass@1, %", "plain", "20.0", "10.0", "12.5", "10.0"],
        ["held_out", "loss, nats a token", "", "", "", "1.539", ""],
        ["humaneval", "acceptance length, greedy", "hybrid", "5.00", "", "3.50", ""],
    ]


def test_different_prompts_with_one_name_are_reported() -> None:
    """Bug: two sets named "chat", of different files or seeds, shared a table without a message."""
    compared = reports() | {"old": reports()["gated"]}
    compared["gated"]["speed"]["content"] = {"chat": "1", "humaneval": "2"}
    compared["dual"]["speed"]["content"] = {"chat": "3", "humaneval": "2"}
    (warning,) = prompt_warnings(compared)
    assert warning.startswith("warning: chat has different prompts in these reports")
    assert "gated / dual." in warning


def test_a_question_mark_is_explained() -> None:
    """Bug: the demo ended with 1.41? and nothing on the screen said what the mark means."""
    compared = reports()
    for report in compared.values():
        for each in report["speed"]["rows"]:
            each["marks"] = []
    assert not list(mark_notes(compared))
    compared["dual"]["speed"]["rows"][-1]["marks"] = [BUSY]
    (note,) = mark_notes(compared)
    assert note.startswith("?: not reliable")


def test_a_report_without_scores_has_no_table_of_all_models() -> None:
    assert not list(model_tables({"a": speed(row("hybrid", 2.0, 3.0))}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["reports=[]"], "reports must not be empty"),
        (
            ["reports=[a/report,b/report]"],
            "names must be different, got report, report",
        ),
        (
            ["reports=[a,b]", "names=[x]"],
            "names must have one name for each of 2 reports, got 1",
        ),
    ],
)
def test_reports_and_names_must_fit(given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings("compare", CompareConfig, given)


def test_other_parts_alone_are_refused(tmp_path: Path) -> None:
    """Beside a report of speed, a report of other parts was missing from the tables."""
    (tmp_path / "gsd").mkdir()
    write_json(tmp_path / "gsd" / "result.json", with_checksum({"rows": []}))
    config = settings("compare", CompareConfig, [f"reports=[{tmp_path}]"])
    with pytest.raises(UserError, match="must have the part speed or quality"):
        main(config)
    rows = {"speed": {"rows": []}, "quality": None}
    config = settings("compare", CompareConfig, [f"reports=[a,{tmp_path}]"])
    read = [{"name": "a", **rows}, read_parts(tmp_path)]
    with (
        patch("infer.bench.report.read_parts", side_effect=read),
        pytest.raises(UserError, match=f"reports={tmp_path} must have the part"),
    ):
        main(config)


def test_a_missing_report_is_named_by_its_setting(tmp_path: Path) -> None:
    """The message was about out=, which this command does not have."""
    config = settings("compare", CompareConfig, [f"reports=[{tmp_path}/absent]"])
    with pytest.raises(UserError, match="reports=.*/absent must have a finished part"):
        main(config)
