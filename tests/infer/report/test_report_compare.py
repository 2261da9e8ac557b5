"""python -m infer.report compare=A,B."""

import json
import shutil
from pathlib import Path

import pytest

from infer.report.__main__ import ReportConfig, main
from tests.infer.report import report_fixture as fixture
from tests.infer.report.test_report_page import Page
from tests.infer.report.test_report_write import command, lines, refused


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two reports: in the second `auto` is a fifth faster, on another torch, without peers."""
    first = fixture.speed(sets=("humaneval",), temperatures=(0.0,))
    second = fixture.faster(first, 1.2)
    second["rows"] = [row for row in second["rows"] if not row["peer"]]
    second["versions"] = second["versions"] | {"torch": "2.14.0"}
    second["settings"] = second["settings"] | {"max_new_tokens": 512}
    root = tmp_path_factory.mktemp("reports")
    return (
        fixture.write_parts(root / "a", speed=first, quality=fixture.quality()),
        fixture.write_parts(root / "b", speed=second, quality=fixture.quality(base=False)),
    )


def test_two_reports_row_by_row(folders: tuple[Path, Path], tmp_path: Path, monkeypatch, capsys) -> None:
    first, second = folders
    command(monkeypatch, f"compare={first},{second}", f"out={tmp_path}")
    result = json.loads((tmp_path / "comparison.json").read_text())
    rows = {(row["decoder"], row["k"]): row for row in result["speed"]}
    assert rows["auto", 0]["ratio"] == pytest.approx(1.2) and rows["auto", 0]["overlap"] is False
    assert rows["sdsat", 5]["ratio"] == 1 and rows["sdsat", 5]["overlap"] is True
    assert rows["plain", 0]["overlap"] is None
    names = {item["name"]: item["values"] for item in result["differences"]}
    assert names["versions.torch"] == ["2.13.0", "2.14.0"] and "settings.max_new_tokens" in names
    assert [item["report"] for item in result["lone"]] == ["a"] * 4
    assert all(row["change"] == 0 and row["overlap"] for row in result["quality"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 or str(first) in printed
    assert printed.index("versions.torch") < printed.index("humaneval, bfloat16")
    shares = next(line for line in printed.splitlines() if line.startswith("sdsat ") and "30 %" in line)
    assert shares.split()[1::2] == ["50", "50", "20", "20", "30", "30", "5.13"]
    assert "only in a: vllm on humaneval" in lines(printed) and "* the intervals do not overlap" in printed
    page = Page.read(tmp_path / "index.html")
    assert {"versions.torch" in page.text, "sdsat (adaptive only)" in page.text, "1.20" in page.text} == {True}
    main(ReportConfig(str(tmp_path), f"{second},{first}"))  # over an earlier comparison


def test_two_folders_of_one_name_are_reported_apart(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch, capsys
) -> None:
    """runs/1/report and runs/2/report: "only in report: ..." was said of either."""
    places = [Path(shutil.copytree(item, tmp_path / item.name / "report")) for item in folders]
    command(monkeypatch, f"compare={places[0]},{places[1]}", f"out={tmp_path / 'c'}")
    result = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert result["names"] == ["report (A)", "report (B)"]
    assert "only in report (A): vllm on humaneval" in lines(capsys.readouterr().out)


def test_what_cannot_be_compared_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = folders
    old = fixture.write_parts(tmp_path / "old", speed=fixture.speed(sets=("humaneval",)) | {"schema": 1})
    for other, out, sentence in (
        ("absent", "c", "compare=absent must be a report's folder, got no such folder"),
        (".", "c", "must be a report's folder, with what infer.speed or infer.quality left in it"),
        (second, first, "must be a folder for the comparison alone, got another result in it"),
        (old, "c", "must be a speed report of schema 4, got schema 1"),
    ):
        assert sentence in refused(monkeypatch, capsys, f"compare={first},{other}", f"out={out}")
