"""No combination of draft sources changes a token."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from infer.config import DecodeConfig
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafters, Limits, Step, decode
from infer.methods import Methods
from infer.ngrams import NgramTable
from infer.trees.mask_tokens import MaskTokens
from tests.conftest import tiny_llama
from tests.infer.library import collect
from tests.infer.ngram_tables import make_random_table, make_table

V = 97  # of tiny_llama
SOURCES = ("adaptive", "text", "ngrams")
SUBSETS = [list(subset) for n in (1, 2, 3) for subset in combinations(SOURCES, n)]
PROBES: list[dict[str, Any]] = [
    {"k": 3, "probes": "root"},
    {"k": 2, "probes": "all"},
    {"k": 3, "probes": "2"},
    {"k": 3, "probes": "root", "nodes": 9},
    {"k": 2, "probes": "all", "nodes": 5},
    {},
]
SAMPLINGS = st.sampled_from([Sampling(), Sampling(0.8), Sampling(1.5, 10, 0.9)])
PROMPTS = st.lists(
    st.lists(st.integers(2, V - 1), min_size=1, max_size=12), min_size=1, max_size=3
)


@cache
def model_of(seed: int) -> PreTrainedModel:
    """Return a random model; with seed 1 it repeats few tokens, so that n-grams are right."""
    lm = tiny_llama(seed=seed).double()
    with torch.no_grad():
        lm.lm_head.weight[torch.arange(V) % 20 > 0] *= 0.2 if seed == 1 else 1.0
    return lm


def texts_of(
    lm: PreTrainedModel,
    requests: Sequence[Request],
    drafters: Any,
    sampling: Sampling,
    new: int = 24,
    **runner: Any,
) -> tuple[list[list[int]], list[Step]]:
    running = Runner(
        lm, capacity=12 + new, max_rows=drafters.max_rows, batch=len(requests), **runner
    )
    return collect(
        decode(running, requests, drafters, Limits(new, [1]), sampling), len(requests)
    )


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NgramTable]:
    """Return an n-gram table of a model's own texts and a random one."""
    folder = tmp_path_factory.mktemp("tables")
    requests = [Request([first]) for first in range(2, 40)]
    texts, _ = texts_of(model_of(1), requests, Drafters(), Sampling())
    own = [[*request.prompt, *text] for request, text in zip(requests, texts)]
    return {
        "own": make_table(folder / "own", own, order=4, vocabulary=V),
        "random": make_random_table(folder / "random", order=5, vocabulary=V, seed=0),
    }


@settings(max_examples=60)
@given(
    st.data(),
    st.integers(0, 3).map(model_of),
    st.sampled_from(["own", "random"]),
    PROMPTS,
    st.sampled_from(["hybrid", "hybrid", "ngrams", "prompt_lookup"]),
    SAMPLINGS,
    st.booleans(),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from([1, 2, 7, 24, 40]),
    st.sampled_from([0, 1, 9]),
)
def test_no_source_of_drafts_changes_a_token(
    tables: dict[str, NgramTable],
    data: st.DataObject,
    lm: PreTrainedModel,
    table: str,
    prompts: list[list[int]],
    method: str,
    sampling: Sampling,
    static: bool,
    penalty: float,
    new: int,
    diverse: int,
) -> None:
    """Holds in float64, greedy and sampled, with dynamic and fixed shapes.

    `diverse` is the number of diverse tokens; 0 uses noise.
    """
    given: dict[str, Any] = {"method": method, "temperature": sampling.temperature}
    given |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    if method == "hybrid":
        given["sources"] = data.draw(st.sampled_from(SUBSETS))
    if "adaptive" in given.get("sources", ()):
        given |= data.draw(st.sampled_from(PROBES))
    elif data.draw(st.booleans()):
        given["nodes"] = data.draw(st.integers(1, 9))
    mask = MaskTokens((*range(80, 80 + diverse),)) if diverse else MaskTokens(noise=V)
    methods = Methods(lm, mask, 3, table=tables[table])
    drafters = methods.drafters(
        DecodeConfig(**given), batch=len(prompts), capacity=12 + new, left=99
    )
    processors = (
        LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
        if penalty > 1
        else None
    )
    requests = [Request(prompt, n, processors) for n, prompt in enumerate(prompts)]
    texts, steps = texts_of(lm, requests, drafters, sampling, new, static=static)
    for request, text in zip(requests, texts):
        assert texts_of(lm, [request], Drafters(), sampling, new)[0] == [text]
    allowed = set(
        given.get("sources")
        or {"ngrams": SOURCES[1:], "prompt_lookup": SOURCES[1:2]}[method]
    )
    for step in steps:
        assert len(step.proposed) == step.drafted and len(step.sources) == step.accepted
        assert {*step.proposed, *step.sources} <= allowed
