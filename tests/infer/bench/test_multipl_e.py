"""Test that verdicts are read from the files of MultiPL-E's container."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from infer.bench.multipl_e import with_container_verdicts


def row(benchmark: str) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "who": "model",
        "decoder": "plain",
        "metric": "not judged",
        "value": None,
        "interval": None,
        "cut_off": 0,
        "unfit": 0,
        "problems": 2,
        "same": 0,
        "compared": 0,
    }


def judge_by_container(folder: Path, language: str, statuses: list[str]) -> None:
    folder = folder / f"multipl_e-{language}-model-plain"
    folder.mkdir()
    for at, status in enumerate(statuses):
        result = {"status": status, "exit_code": 0 if status == "OK" else 1}
        content = json.dumps({"name": str(at), "results": [result]}).encode()
        (folder / f"{at}.results.json.gz").write_bytes(gzip.compress(content))


def test_languages_and_their_average_are_read_back(tmp_path: Path) -> None:
    rows = [row("multipl_e-cpp"), row("multipl_e-sh") | {"unfit": 1}, row("infilling")]
    judge_by_container(tmp_path, "cpp", ["OK", "Exception"])
    (cpp, sh, infilling) = with_container_verdicts(rows, tmp_path)
    assert cpp["value"] == 0.5 and cpp["metric"] == "pass@1" and cpp["interval"]
    assert sh["value"] is None and infilling == row("infilling")
    judge_by_container(tmp_path, "sh", ["OK", "OK"])
    *_, average = with_container_verdicts(rows, tmp_path)
    assert average["benchmark"] == "multipl_e-average" and average["value"] == 0.75
    assert average["problems"] == 4
    # Regression: the average had the number of the first language alone.
    assert average["unfit"] == 1


def test_a_damaged_result_is_a_sentence(tmp_path: Path) -> None:
    judge_by_container(tmp_path, "sh", ["OK", "OK"])
    next(tmp_path.glob("*/*")).write_bytes(b"x")
    with pytest.raises(UserError, match="must be a result of MultiPL-E's container"):
        with_container_verdicts([row("multipl_e-sh")], tmp_path)
