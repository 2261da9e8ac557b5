"""Test that invalid settings raise an error that names the setting."""

import numpy as np
import pytest

from infer import DecodeConfig, Infill
from infer.config import InferConfig

DECODE = [
    (
        {"temperature": float("nan")},
        "decode.temperature must be finite and at least 0, got nan",
    ),
    (  # the message said "must be at least 0, got inf"
        {"temperature": float("inf")},
        "decode.temperature must be finite and at least 0, got inf",
    ),
    (  # the message said "must be at least 0, got 1e+30"
        {"temperature": 1e30},
        "decode.temperature must be 0 to 9223372036854775807, got 1e\\+30",
    ),
    ({"top_p": 0.0}, "decode.top_p must be above 0 and at most 1, got 0.0"),
    (
        {"top_p": 0.9},
        "decode.temperature must be above 0 with decode.top_k or decode.top_p, got 0",
    ),
    ({"method": "sdsd"}, "decode.method must be plain, .* or gsd, got sdsd"),
    (
        {"sources": ["trie"]},
        "decode.sources must be adaptive, text or ngrams, got trie",
    ),
    (
        {"sources": []},  # it drafted from all sources
        "decode.sources must not be empty, got \\[\\]. Omit it for all sources",
    ),
    (
        {"method": "ngrams", "sources": ["adaptive"]},
        "decode.sources must be among text, ngrams with decode.method=ngrams",
    ),
    (
        {"method": "gsd", "sources": ["text"]},
        "decode.sources must be left out with decode.method=gsd, .* prompt_lookup,",
    ),
    ({"k": 0}, "decode.k must be at least 1, got 0"),
    (
        {"probes": "0"},
        "decode.probes must be auto, root, all or a number of at least 1, got 0",
    ),
    (
        {"method": "plain", "tree": "paper"},
        "decode.tree must be left out with decode.method=plain, .* sdsat",
    ),
    (
        {"method": "tsd", "tau": 3},
        "decode.tau must be left out with decode.method=tsd, got 3. .* gsd",
    ),
    *(
        (
            {"method": method, "k": 2},
            f"decode.k must be left out with decode.method={method}, got 2. .* hybrid, sdsat",
        )
        for method in ("ngrams", "prompt_lookup", "ssd", "gsd")
    ),
    (
        {"method": "hybrid", "sources": ["text"], "k": 2},
        "decode.k must be left out without adaptive in decode.sources, got 2",
    ),
    (
        {"method": "hybrid", "sources": ["text"], "probes": 1},
        "decode.probes must be left out without adaptive in .*, got 1",
    ),
    (
        {"method": "hybrid", "nodes": 9},
        "decode.probes must be root, all or a number with decode.nodes=9, got auto",
    ),
    (
        {"method": "gsd", "verify": "ratio"},
        "decode.temperature must be above 0 with decode.verify=ratio, got 0",
    ),
    ({"seed": -1}, "decode.seed must be from 0 to below .*, got -1"),
    ({"stop": ["x", ""]}, "decode.stop must not contain an empty string"),
]
DRAFT = [
    ("", "draft must be a model directory or self:N, got an empty name"),
    *(
        (f"self:{n}", f"draft must be self:N .* got self:{n}")
        for n in ("", "0", "half")
    ),
]
CASES = [(DecodeConfig, *case) for case in DECODE] + [
    (InferConfig, {"model": "DIR", "draft": draft}, sentence)
    for draft, sentence in DRAFT
]
CASES += [
    (  # the minimum was ignored without a message
        DecodeConfig,
        {"min_new_tokens": 9, "max_new_tokens": 4},
        "decode.min_new_tokens must be at most decode.max_new_tokens=4, got 9. Lower it",
    ),
    (Infill, {"prefix": 5}, "infill.prefix must be a text, got 5"),
    (  # OpenMP ended the process without a message
        InferConfig,
        {"model": "DIR", "threads": 100_000},
        "threads must be 1 to 1024, got 100000",
    ),
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
    """Regression: a penalty of 2 in place of 2.0 raised ValueError in the middle of a call."""
    config = DecodeConfig(max_new_tokens=np.int64(4), repetition_penalty=2, probes=2)  # type: ignore[arg-type]
    assert config == DecodeConfig(max_new_tokens=4, repetition_penalty=2.0, probes="2")
