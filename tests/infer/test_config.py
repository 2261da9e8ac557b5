"""Settings that cannot be are refused in a sentence that names them."""

import numpy as np
import pytest

from infer import DecodeConfig, DraftConfig, Infill

DECODE = [
    ({"temperature": float("nan")}, "decode.temperature must be at least 0, got nan"),
    ({"temperature": [1]}, r"decode.temperature must be a number, got \[1\]"),
    ({"temperature": -1.0}, "decode.temperature must be at least 0, got -1.0"),
    ({"top_p": 0.0}, "decode.top_p must be above 0 and at most 1, got 0.0"),
    ({"top_k": -1}, "decode.top_k must be at least 0"),
    (
        {"top_p": 0.9},
        "decode.temperature must be above 0 with decode.top_k or decode.top_p, got 0",
    ),
    ({"method": "sdsd"}, "decode.method must be plain, .* or gsd, got sdsd"),
    ({"method": ""}, "decode.method must be .* or gsd, got nothing"),
    (
        {"sources": ["trie"]},
        "decode.sources must be adaptive, text or ngrams, got trie",
    ),
    ({"sources": "text"}, "decode.sources must be a list, got 'text'"),
    (
        {"method": "ngrams", "sources": ["adaptive"]},
        "decode.sources must be some of text, ngrams with decode.method=ngrams",
    ),
    (
        {"method": "gsd", "sources": ["text"]},
        "decode.sources must be left out with decode.method=gsd, .* prompt_lookup,",
    ),
    ({"k": 0}, "decode.k must be at least 1, got 0"),
    ({"k": 2.5}, "decode.k must be a whole number, got 2.5"),
    (
        {"probes": "0"},
        "decode.probes must be auto, root, all or a number of drafts from 1 on, got 0",
    ),
    (
        {"method": "plain", "tree": "paper"},
        "decode.tree must be left out with decode.method=plain, .* sdsat",
    ),
    ({"tree": ""}, "decode.tree must be chain or paper, got nothing"),
    (
        {"method": "tsd", "tau": 3},
        "decode.tau must be left out with decode.method=tsd, got 3. .* gsd",
    ),
    ({"method": "gsd", "tau": 0}, "decode.tau must be at least 1, got 0"),
    (
        {"method": "ssd", "k": 2},
        "decode.k must be left out with decode.method=ssd, got 2",
    ),
    ({"theta_prob": 2.0}, "decode.theta_prob must be 0 to 1, got 2.0"),
    (
        {"method": "gsd", "verify": "ratio"},
        "decode.temperature must be above 0 with decode.verify=ratio, got 0",
    ),
    ({"max_new_tokens": 0}, "decode.max_new_tokens must be at least 1, got 0"),
    ({"repetition_penalty": 0.0}, "decode.repetition_penalty must be above 0, got 0.0"),
    ({"seed": -1}, "decode.seed must be from 0 to below .*, got -1"),
    ({"stop": ["x", ""]}, "decode.stop must be texts, got an empty one"),
    ({"stop": [3]}, "decode.stop must be a text, got 3"),
]
DRAFT = [
    ({"model": ""}, "draft must be a model directory or self:N, got nothing"),
    (
        {"adaptive": True},
        "draft must be a model with draft_adaptive=true, got none",
    ),
    *(
        ({"model": f"self:{n}"}, f"draft must be self:N .* got self:{n}")
        for n in ("", "0", "-1", "half")
    ),
]
CASES = [(DecodeConfig, *case) for case in DECODE] + [
    (DraftConfig, *case) for case in DRAFT
]
CASES += [
    (Infill, {"prefix": 5}, "infill.prefix must be a text, got 5"),
    (Infill, {"order": "mps"}, "infill.order must be psm or spm, got mps"),
]


@pytest.mark.parametrize(
    ("schema", "chosen", "sentence"), CASES, ids=[case[2][:40] for case in CASES]
)
def test_settings_that_cannot_be_are_named(
    schema: type, chosen: dict, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        schema(**chosen)


def test_numbers_of_other_types_are_taken() -> None:
    """A penalty of 2 for 2.0 was a ValueError in the middle of a call; probes=2, a number, a TypeError."""
    config = DecodeConfig(
        max_new_tokens=np.int64(4), repetition_penalty=2, probes=2, stop=("x",)
    )  # type: ignore[arg-type]
    assert (config.max_new_tokens, config.repetition_penalty, config.probes) == (
        4,
        2.0,
        "2",
    )
