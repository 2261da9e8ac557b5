"""Figures in docs/ that a plan computes: the pages say what the command says today."""

import re
from pathlib import Path

import pytest

from conf import settings
from train.config import TrainConfig
from train.plan import plan

PAGE = (Path(__file__).parents[1] / "docs" / "codellama_7b.md").read_text(
    encoding="utf-8"
)
# settings | GPUs | hours | GPU-hours | memory per GPU
PLANS = re.findall(
    r"^\| `(experiment=[^`]+)`[^|]* \| (\d+)[^|]* \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) GiB",
    PAGE,
    re.M,
)


@pytest.mark.parametrize(
    "given, ranks, hours, gpu_hours, memory", PLANS, ids=[row[0] for row in PLANS]
)
def test_the_table_of_plans(
    given: str, ranks: str, hours: str, gpu_hours: str, memory: str
) -> None:
    lines = plan(settings("train", TrainConfig, given.split()))
    result, machines = re.match(r"([\d.]+) on (\d+) x", lines["hours"]).groups()  # type: ignore[union-attr]
    assert (result, machines) == (hours, ranks)
    total, rounding = float(result) * int(machines), 0.05 * int(machines) + 0.5
    assert float(gpu_hours.replace(",", "")) == pytest.approx(total, abs=rounding)
    assert f" {memory} of " in lines["memory per GPU"]


def test_every_plan_was_read() -> None:
    assert len(PLANS) == 8
