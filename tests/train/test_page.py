"""Test the content of a run's page before, during and after training."""

import re
from dataclasses import replace

import pytest

from conf.console import format_duration
from conf.settings.compose import settings
from train.config import TrainConfig
from train.page import (
    Run,
    cells,
    changed_settings,
    data_facts,
    machine_facts,
    model_facts,
    page,
    recipe,
    running_mean,
    training_seconds,
)

DATA = {
    "documents": 1234,
    "tokens": 5_678_901,
    "modes": {"PLAIN": 1000, "PSM": 234},
    "languages": ["python", "rust"],
    "decontaminated": None,
    "own": {"documents": 5, "tokens": 600, "share": 0.5},
}


def held_out(step: int, accuracy: float) -> dict[str, float]:
    accuracies = {f"accuracy_{offset}": accuracy / offset for offset in (1, 2)}
    drafts = {"masked_loss": 9 - step, "accepted": accuracy, "tau_real": 1 + accuracy}
    return {"step": step, "sequences": 2, "standard_loss": 2.0, **drafts, **accuracies}


def run(steps: int) -> Run:
    config = settings("train", TrainConfig, ["experiment=demo", "global_batch=4"])
    logged = {"masked_loss": 5.0, "lr": 1e-3, "gradient_norm": 0.5, "memory_gib": 2.0}
    return Run(
        name="a <run>",
        config=config,
        steps=[
            {"step": step, "tokens_per_second": 100.0, **logged}
            for step in range(1, steps + 1)
        ],
        validation=[held_out(step, step / 10) for step in {0, steps}],
        seq_len=50,
        planned=8,
        model=model_facts({}, parameters=1000, dtype="float32"),
        data=data_facts(DATA),
        machine=machine_facts("cpu", ranks=2),
    )


def test_a_page_before_the_first_step_shows_the_base_models_figures() -> None:
    text = page(run(0))
    assert "step 0 of 8" in text
    assert "→" not in text and "1.00" in text
    assert "training time" not in text
    assert "Gradient norm" not in text  # its curve needs steps


def test_a_page_shows_curves_settings_data_and_time() -> None:
    text = page(run(4))
    assert text.count("<svg") == 7
    assert "1.00 → 1.40" in text
    assert "a &lt;run&gt;" in text  # names are escaped
    assert "1,234 (1,000 PLAIN, 234 PSM)" in text
    assert "5 documents, 600 tokens, 50 % of each step" in text
    assert re.search(r"objective.name</th><td>branch", text)
    assert re.search(r"page written</th><td>\d{4}-\d\d-\d\d \d\d:\d\d UTC<", text)
    assert "8 s" in text  # 4 steps of 200 tokens, 100 tokens/s
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=\"(?!#)", text)


def test_a_page_compares_validations_of_the_same_sequences() -> None:
    """Bug: after a change of validate_sequences the acceptance lengths were of different sequences."""
    other = held_out(0, 0.9) | {"sequences": 16}
    changed = replace(run(4), validation=[other, held_out(2, 0.2), held_out(4, 0.4)])
    assert "1.20 → 1.40" in page(changed)
    single = replace(run(4), validation=[other, held_out(4, 0.4)])
    values = [cell.figure for cell in cells(single)]
    assert values[:3] == ["1.40", "40 %", "2.000"]


def test_the_recipe_contains_only_changed_settings() -> None:
    config = settings("train", TrainConfig, ["objective.L=7", "seed=3"])
    names = dict(changed_settings(config, TrainConfig()))
    assert names["objective.L"] == 7
    assert names["seed"] == 3
    assert "optimizer.beta1" not in names
    assert "tracker.project" not in names  # a default from the environment


def test_the_recipe_has_no_steps_that_minutes_replaced() -> None:
    """Bug: a page of 97 steps said steps=16, the experiment's number, beside minutes=5."""
    config = settings("train", TrainConfig, ["experiment=demo", "minutes=5"])
    assert "minutes" in recipe(config) and "steps" not in recipe(config)
    assert recipe(replace(config, minutes=None, steps=7))["steps"] == "7"


def test_the_training_time_is_the_sum_of_steps() -> None:
    assert training_seconds(run(4)) == pytest.approx(8)


@pytest.mark.parametrize(
    ("seconds", "text"), [(42, "42 s"), (720, "12 min"), (11_100, "3 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_running_mean_has_fewer_neighbours_at_the_ends() -> None:
    assert running_mean([1, 2, 6], 1) == [1.5, 3, 4]
    assert running_mean([1, 2, 6], 0) == [1, 2, 6]
