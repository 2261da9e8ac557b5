"""Sampling at low temperatures: every method emits the tokens of plain decoding."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from infer import DecodeConfig, Model, generate, load
from infer.drafters.places import Places
from infer.engine.output import Candidates
from infer.engine.sampling import Sampling
from infer.ngrams import Ngrams, TextNgrams

NEW = 24
METHODS = {
    "hybrid": {"k": 3},
    "sdsat, paper's tree": {
        "method": "sdsat",
        "k": 5,
        "tree": "paper",
    },
    "adaptive tokens alone": {"method": "hybrid", "k": 3, "sources": ["adaptive"]},
    "ngrams": {},
    "prompt_lookup": {},
    "ssd": {},
    "tsd": {"theta_prob": 0.01},
    "gsd": {"theta_prob": 0.01},
}
TEMPERATURES = st.floats(-4, 0.5).map(lambda power: 10**power)


@pytest.fixture(scope="module")
def drafted(model_dir: Path) -> Model:
    return load(model_dir, "float32", draft="self:1")


@pytest.mark.parametrize("name", METHODS)
@given(
    temperature=TEMPERATURES,
    top_p=st.sampled_from([1.0, 0.9, 0.01]),
    top_k=st.sampled_from([0, 1, 20]),
    seed=st.integers(0, 2**63 - 1),
)
@hypothesis_settings(max_examples=5, deadline=None, derandomize=True)
def test_tokens_are_those_of_plain_decoding(
    drafted: Model, name: str, temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    how = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": NEW,
    }
    prompt = [0, *[20, 31, 42] * 12]

    def tokens(**method: object) -> list[int]:
        steps = generate(
            drafted, prompt, DecodeConfig(**{**how, **method}), seeds=[seed]
        )
        return [token for step in steps for token in step.tokens]

    assert tokens(**{"method": name, **METHODS[name]}) == tokens(method="plain")


@given(
    temperature=TEMPERATURES,
    repeats=st.integers(1, 2000),
    answered=st.booleans(),
    zero=st.booleans(),
)
@hypothesis_settings(max_examples=50, deadline=None, derandomize=True)
def test_scores_of_a_place_stay_numbers(
    temperature: float, repeats: int, answered: bool, zero: bool
) -> None:
    """The score of a token that n-grams were sure of was beyond all floats: an OverflowError."""
    text = [5, 6, 7] * repeats
    ngrams = TextNgrams(Ngrams(None, 50_000))
    answers = (
        Candidates([[9, 8]], [[1.0, 0.0] if zero else [0.6, 0.4]]) if answered else None
    )
    places = Places(text, answers, ngrams, 4, Sampling(temperature), seed=3)
    places.grow([0.0] * 40, depth=4)
    assert all(0 <= chance <= 1 for chance in places.graph.chances[1:])
