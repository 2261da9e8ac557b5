"""The soak's own eyes: cases that can be asked for, and growth told from noise."""

import random

import pytest

from infer import Model
from tests.drills.soak.cases import SLOTS, Source, draw, settings_of
from tests.drills.soak.memory import Sample, verdict

CODE = [f"def f{n}(x):\n    return x + {n}\n" * 9 for n in range(5)]


def test_a_case_is_that_of_its_number_and_can_be_asked_for(model: Model) -> None:
    source = Source(model.text, CODE, model.context, 400)
    slots = set[str]()
    for number in range(200):
        case = draw(1, number, source)
        assert case.ways == draw(1, number, source).ways != draw(2, number, source).ways
        assert 1 <= len(case.prompts) == len(case.seeds) <= 8
        slots.add(case.slot)
        for way in case.ways:
            if case.slot != "library":
                settings_of(case, way)  # raises for settings that no decoder has
    assert slots == set(SLOTS)


@pytest.mark.parametrize(
    ("kib", "objects", "files", "grows"),
    [
        (0.0, 0.0, 0, []),
        (3.0, 0.0, 0, ["kib"]),
        (0.0, 1.5, 0, ["objects"]),
        (0.0, 0.0, 1, ["files"]),
    ],
    ids=["flat", "a text each", "an object each time", "a file once"],
)
def test_growth_is_told_from_noise(kib: float, objects: float, files: int, grows: list[str]) -> None:
    """Over 300 samples of a run: noise of 10 MiB, and 60 MiB more at once while it warms up."""
    rng, samples = random.Random(0), list[Sample]()
    for n in range(300):
        requests = 40 * n
        held = 400e3 + rng.gauss(0, 5e3) + (60e3 if n > 60 else 0) + kib * requests
        found = round(4e5 + objects * requests)
        samples.append(Sample(n, requests, held, held, found, 4 * found, 6 + files * (n > 200), 1))
    assert verdict(samples)["grows"] == grows
