"""Test the schedules of `steps` and of `minutes`; test_resume.py resumes such runs."""

from pathlib import Path

import pytest

from conf.errors import UserError
from conf.runs.files import read_json, write_json
from train.config import OptimizerConfig
from train.schedule import (
    Schedule,
    learning_rate,
    plan_steps,
    read_planned,
    write_planned,
)

CONFIG = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2)


def test_steps_are_planned_after_two_fifths_of_the_time() -> None:
    """The first steps are slower, so only the later three of five count."""
    seconds = [9.0, 3.0, 2.0, 2.0, 2.0]
    assert plan_steps(5, seconds, elapsed=39.0, total=100.0) == Schedule(None)
    assert plan_steps(5, seconds, elapsed=40.0, total=100.0) == Schedule(5 + 30, 5)
    validated = plan_steps(5, seconds, elapsed=40.0, total=100.0, between=2.0)
    assert validated == Schedule(5 + 15, 5)


def test_a_run_past_its_time_takes_one_more_step() -> None:
    assert plan_steps(2, [50.0, 50.0], elapsed=101.0, total=100.0).steps is None
    late = plan_steps(3, [50.0] * 3, elapsed=151.0, total=100.0)
    assert late == Schedule(4, 3)


def test_the_rate_falls_from_the_step_of_planning() -> None:
    """Before that step it does not depend on the plan, so that a resumed run repeats it."""
    before, after = Schedule(None), Schedule(20, 8)
    first = [learning_rate(step, before, CONFIG) for step in range(8)]
    assert first == [0.5, *[1.0] * 7]
    assert [learning_rate(step, after, CONFIG) for step in range(8)] == first
    rest = [learning_rate(step, after, CONFIG) for step in range(8, 20)]
    assert rest[0] == 1.0 and rest[-1] == pytest.approx(0.1)
    assert rest == sorted(rest, reverse=True)


def test_an_edited_plan_is_refused(tmp_path: Path) -> None:
    assert read_planned(tmp_path) is None
    write_planned(tmp_path, Schedule(20, 8))
    assert read_planned(tmp_path) == Schedule(20, 8)
    path = tmp_path / "planned.json"
    write_json(path, read_json(path) | {"steps": 30})
    with pytest.raises(UserError, match="checksum mismatch: the file was edited"):
        read_planned(tmp_path)
