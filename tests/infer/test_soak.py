"""The soak drill: its cases can be decoded, and it tells growth from noise."""

import random

import pytest

from infer import Model
from tests.drills.memory import Sample, verdict
from tests.drills.soak import SLOTS, draw

CODE = [f"def f{n}(x):\n    return x + {n}\n" * 9 for n in range(5)]


def test_a_case_depends_on_its_number_alone(model: Model) -> None:
    cases = [draw(1, number, model.text, CODE, model.context) for number in range(200)]
    assert [case.slot for case in cases] == [
        draw(1, n, model.text, CODE, model.context).slot for n in range(200)
    ]
    assert {case.slot for case in cases} == set(SLOTS)
    assert all(1 <= len(case.prompts) == len(case.seeds) <= 8 for case in cases)


@pytest.mark.parametrize(
    ("kib", "objects", "files", "grows"),
    [(0.0, 0.0, 0, []), (3.0, 0.0, 0, ["kib"]), (0.0, 1.5, 0, ["objects"]), (0.0, 0.0, 1, ["files"])],
    ids=["flat", "a text each", "an object each time", "a file once"],
)
def test_growth_is_reported_from_noise(kib: float, objects: float, files: int, grows: list[str]) -> None:
    """Over 300 samples of a run: noise of 10 MiB, and 60 MiB more at once while it warms up."""
    rng, samples = random.Random(0), list[Sample]()
    for n in range(300):
        requests = 40 * n
        held = 400e3 + rng.gauss(0, 5e3) + (60e3 if n > 60 else 0) + kib * requests
        samples.append(Sample(n, requests, held, round(4e5 + objects * requests), 6 + files * (n > 200), 1))
    assert verdict(samples)["grows"] == grows
