"""Settings that cannot be are refused in a sentence that names them."""

import numpy as np
import pytest

from infer import DecodeConfig, DraftConfig, Infill

PAPER = {"method": "hybrid", "probes": "root", "width": 4, "tree": "paper"}
DECODE = [
    (
        {"temperature": 1e-39},
        "decode.temperature must be 0 .*or at least 1e-30, got 1e-39",
    ),
    (
        {"temperature": float("nan")},
        "decode.temperature must be 0 .*or at least 1e-30, got nan",
    ),
    ({"temperature": [1]}, r"decode.temperature must be a number, got \[1\]"),
    ({"temperature": 10**400}, "decode.temperature must be a finite number, got 10000"),
    (
        {"temperature": 1.0, "top_p": 0.0},
        "decode.top_p must be a share above 0, up to 1, got 0.0",
    ),
    (
        {"temperature": 1.0, "top_p": 1.1},
        "decode.top_p must be a share above 0, up to 1, got 1.1",
    ),
    ({"temperature": 1.0, "top_k": -1}, "decode.top_k must be at least 0"),
    (
        {"top_p": 0.9},
        "decode.temperature must be above 0 with decode.top_k or decode.top_p, got 0",
    ),
    (
        {"method": "sdsd"},
        "decode.method must be one of plain, hybrid, sdsat, .* gsd, got sdsd",
    ),
    (
        {"method": ""},
        "decode.method must be one of .* gsd, got none$",
    ),  # what ends in "got " says nothing
    ({"method": 3}, "decode.method must be a text, got 3"),
    (
        {"sources": ["trie"]},
        "decode.sources must be some of adaptive, text, ngrams, each once, got",
    ),
    ({"sources": []}, "decode.sources must be some of"),
    ({"sources": ["text", "text"]}, "decode.sources must be some of .* each once"),
    ({"sources": "text"}, "decode.sources must be a list of texts, got 'text'"),
    (
        {"method": "ngrams", "sources": ["adaptive"]},
        "decode.sources must be some of text, ngrams, each once",
    ),
    (
        {"method": "prompt_lookup", "sources": ["ngrams"]},
        "decode.sources must be some of text, each once",
    ),
    (
        {"method": "gsd", "sources": ["text"]},
        "decode.sources must be unset with decode.method=gsd",
    ),
    ({"k": 0}, "decode.k must be at least 1, got 0"),
    ({"k": 2.5}, "decode.k must be a whole number, got 2.5"),
    (
        {"probes": "0"},
        "decode.probes must be auto, root, all or a number of nodes from 1 on, got 0",
    ),
    (
        {"method": "hybrid", "width": 4},
        "decode.nodes and decode.width need decode.probes=root, all or a number",
    ),
    (
        {"method": "prompt_lookup", "nodes": 3},
        "decode.nodes, .* and decode.probes need decode.method=hybrid or",
    ),
    (
        {"method": "plain", "tree": "paper"},
        "decode.tree and .* need decode.method=hybrid or sdsat.* got plain",
    ),
    (
        {"method": "gsd", "tree": "paper"},
        "decode.tree and .* need decode.method=hybrid or sdsat, got gsd",
    ),
    ({"tree": ""}, "decode.tree must be lattice or paper, got nothing"),
    (
        {"method": "hybrid", "tree": "paper"},
        "decode.probes must be root, all or a number .* got auto",
    ),
    (
        {**PAPER, "width": 1},
        "decode.width must be at least 4 with decode.tree=paper, got 1",
    ),
    (
        {**PAPER, "nodes": 16},
        "decode.nodes must be unset with decode.tree=paper, .* got 16",
    ),
    ({**PAPER, "k": 14}, "decode.k must be 1 to 13 with decode.tree=paper, got 14"),
    (
        {"method": "hybrid", "tau": 3},
        r"decode.tau needs decode.method=ssd\|tsd\|gsd, got hybrid",
    ),
    ({"method": "tsd", "tau": 3}, "decode.tau needs decode.method=gsd.* got tsd"),
    (
        {"method": "gsd", "tau": 0},
        "decode.tau must be at least 1 .* got 0. Set decode.tau_reading=preceding",
    ),
    (
        {"method": "tsd", "tau_reading": "preceding"},
        "decode.tau_reading needs decode.method=gsd.* got tsd",
    ),
    (
        {"method": "plain", "tau_reading": "preceding"},
        "decode.tau_reading needs decode.method=ssd.* got plain",
    ),
    ({"tau_reading": "both"}, "decode.tau_reading must be gram or preceding, got both"),
    (
        {"method": "ssd", "k": 2},
        "decode.k must be 1 with decode.method=ssd, a sequence, got 2",
    ),
    (
        {"method": "ssd", "theta_sib": 0.5},
        r"decode.theta_sib needs decode.method=tsd\|gsd.* got ssd",
    ),
    ({"theta_prob": 2.0}, "decode.theta_prob must be between 0 and 1, got 2.0"),
    ({"draft_rows": 4097}, "decode.draft_rows must be at most 4096, got 4097"),
    (
        {"method": "gsd", "verify": "both"},
        "decode.verify must be pick or ratio, got both",
    ),
    (
        {"method": "gsd", "verify": "ratio"},
        "temperature must be above 0 with decode.verify=ratio, got 0",
    ),
    (
        {"method": "plain", "temperature": 1.0, "verify": "ratio"},
        "decode.verify=ratio needs .*gsd.*got plain",
    ),
    ({"max_new_tokens": 0}, "decode.max_new_tokens must be at least 1, got 0"),
    ({"max_new_tokens": "5"}, "decode.max_new_tokens must be a whole number, got '5'"),
    (
        {"max_new_tokens": None},
        "decode.max_new_tokens must be a whole number, got None",
    ),
    (
        {"max_new_tokens": True},
        "decode.max_new_tokens must be a whole number, got True",
    ),
    (
        {"min_new_tokens": 300},
        "decode.min_new_tokens must be at most decode.max_new_tokens=256",
    ),
    ({"repetition_penalty": 0.0}, "decode.repetition_penalty must be above 0, got 0.0"),
    ({"seed": 2**63}, "decode.seed must be a number of up to 63 bits"),
    ({"stop": ["x", ""]}, "decode.stop must be texts, got an empty one"),
    ({"stop": "ab"}, "decode.stop must be a list of texts, got 'ab'"),
    ({"stop": [3]}, r"decode.stop must be a list of texts, got \[3\]"),
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
