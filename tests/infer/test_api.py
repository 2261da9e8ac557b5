"""Test load and generate: every method equals plain decoding, every row its single run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from conf.errors import UserError
from infer import DecodeConfig, Infill, Model, generate, load
from infer.drafters.drafting import SourceDrafters
from infer.drafters.planner import FixedPlanner, MeasuredPlanner
from infer.engine.forward import context_length
from infer.engine.runner import Runners
from infer.methods import Methods
from infer.requests import Prompt
from infer.trees.mask_tokens import MaskTokens
from tests.infer.library import left_padded

METHODS: list[dict[str, Any]] = [
    {"method": "plain"},
    {"method": "prompt_lookup", "nodes": 4},
    {"method": "ngrams"},
    {"method": "sdsat", "k": 3},
    {"method": "sdsat", "k": 4, "probes": 2, "tree": "paper"},
    {"method": "hybrid"},
    {"method": "ngrams", "nodes": 6},
    {"method": "hybrid", "k": 3, "probes": "root"},
    {"method": "hybrid", "k": 3, "probes": "root", "nodes": 12},
    {"method": "hybrid", "k": 3, "probes": "all", "sources": ["adaptive"]},
    {"method": "ssd"},
    {"method": "tsd", "theta_prob": 0.01},
    {"method": "gsd", "theta_prob": 0.01},
]
IDS = st.lists(st.integers(13, 399), min_size=1, max_size=12)
REPEATED = [0, *[20, 31, 42] * 12]


@pytest.fixture(scope="module")
def drafted(model_dir: Path) -> Model:
    """Return the model with its first layer as the draft model."""
    return load(model_dir, "float32", draft="self:1")


def outcomes(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    decode: DecodeConfig,
    **options: Any,
) -> list[tuple[list[int], str]]:
    """Return the tokens and the text of every prompt."""
    steps = list(generate(model, prompts, decode, **options))
    result = []
    for index in range(1 + max(step.sequence for step in steps)):
        own = [step for step in steps if step.sequence == index]
        assert [step.finished for step in own] == [False] * (len(own) - 1) + [True]
        for step in own:
            assert len(step.texts) == len(step.tokens) > 0
            assert 0 <= step.accepted <= min(step.drafted, len(step.tokens))
        tokens = [token for step in own for token in step.tokens]
        result.append((tokens, "".join(step.text for step in own)))
    return result


def always(id: int) -> LogitsProcessorList:
    """A logits processor that makes one id the likeliest everywhere."""
    return LogitsProcessorList(
        [lambda ids, scores: scores.index_fill(1, torch.tensor([id]), 1e4)]
    )


@settings(max_examples=15)
@given(st.data())
def test_every_method_ends_and_chooses_as_plain_decoding_does(
    drafted: Model, data: st.DataObject
) -> None:
    """Greedy, and sampled at any temperature; stop strings, EOS, limits, processors."""
    model = drafted
    prompts = data.draw(
        st.lists(IDS | st.just(REPEATED), min_size=1, max_size=3), label="prompts"
    )
    new = data.draw(st.integers(1, 30))
    temperature = 0.0
    if data.draw(st.booleans()):
        temperature = 10 ** data.draw(st.floats(-4, 0.5))
    plain = DecodeConfig(
        "plain",
        temperature=temperature,
        top_k=data.draw(st.sampled_from([0, 1, 20])) if temperature else 0,
        top_p=data.draw(st.sampled_from([1.0, 0.9, 0.01])) if temperature else 1.0,
        seed=data.draw(st.integers(0, 9)),
        max_new_tokens=new,
        min_new_tokens=data.draw(st.sampled_from([0, new // 2, new])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.0, 1.3, 1e-320])),
        no_repeat_ngram_size=data.draw(st.sampled_from([0, 0, 2])),
    )
    tokens, text = outcomes(model, prompts[0], plain)[0]
    if len(text) > 1 and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(text) - 2))
        stop = text[start : start + data.draw(st.integers(1, 4))]
        plain = replace(plain, stop=[stop, "never there"])
    if data.draw(st.booleans()):
        model = replace(model, eos=frozenset([1, data.draw(st.sampled_from(tokens))]))
    target = [outcomes(model, prompt, plain)[0] for prompt in prompts]
    for method in METHODS:
        assert outcomes(model, prompts, replace(plain, **method)) == target, method
    for tokens, _ in target:
        assert plain.min_new_tokens <= len(tokens) <= new or plain.stop
        assert not model.eos & set(tokens[:-1])
        stream = model.text.stream(opens=False)
        before = "".join(map(stream, tokens[:-1]))
        assert not any(stop in before for stop in plain.stop)


def test_it_is_the_librarys_generate(model: Model) -> None:
    prompt = model.text.encode("def f(x):\n")
    chosen = {
        "repetition_penalty": 0.8,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 25,
        "max_new_tokens": 40,
    }
    expected = model.lm.generate(**left_padded([prompt]), **chosen, do_sample=False)
    result = outcomes(model, prompt, DecodeConfig(**chosen))[0][0]
    assert result == expected[0, len(prompt) :].tolist()


def test_rows_of_unequal_length_are_their_single_runs(model: Model) -> None:
    """Each row has its own seed, end and text; infillings and continuations share a batch."""
    rows: list[Prompt] = [
        "def f(x):\n",
        [0],
        "import os\n" * 9,
        Infill("a = ", "\nb"),
        Infill("", "tail", "spm"),
    ]
    decode = DecodeConfig(max_new_tokens=24, temperature=1.0, top_k=50, top_p=0.9)
    seeds = [3, 1, 4, 1, 5]
    single = [
        outcomes(model, row, replace(decode, seed=seed))[0]
        for row, seed in zip(rows, seeds)
    ]
    assert outcomes(model, rows, decode, seeds=seeds) == single
    assert len({tuple(tokens) for tokens, _ in single}) == 5


def test_eot_ends_a_middle_and_nothing_else(model: Model) -> None:
    decode = DecodeConfig(max_new_tokens=6)
    rows: list[Prompt] = ["x = ", Infill("x = ", "\n"), Infill("x = ", "\n", "spm")]
    result = outcomes(model, rows, decode, processors=always(5))
    assert result == [([5] * 6, ""), ([5], ""), ([5], "")]
    # min_new_tokens holds EOT back, as it does EOS.
    longer = replace(decode, min_new_tokens=6)
    assert 5 not in outcomes(model, [Infill("x = ", "\n")], longer)[0][0][:5]


def test_without_adaptive_json_the_other_methods_work(base_dir, model: Model) -> None:
    base = load(base_dir, "float32")
    assert base.adaptive is None
    target = outcomes(model, "import os\n", DecodeConfig("plain", max_new_tokens=30))
    for method in (None, "plain", "prompt_lookup"):
        decode = DecodeConfig(method, max_new_tokens=30)
        assert outcomes(base, "import os\n", decode) == target
    with pytest.raises(UserError, match="decode.method=hybrid needs a model with adap"):
        generate(base, "x", DecodeConfig("hybrid"))
    plain = DecodeConfig("plain", max_new_tokens=8)
    infill = Infill("a", "b")
    assert outcomes(base, infill, plain) == outcomes(model, infill, plain)


def test_another_attention_of_the_model_changes_no_text(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention adds a boolean mask to the scores."""
    decode = DecodeConfig(k=3, max_new_tokens=12)
    expected = outcomes(model, "x", decode)
    monkeypatch.setattr(model.lm.config, "_attn_implementation", "eager")
    assert outcomes(model, "x", decode) == expected
    assert model.lm.config._attn_implementation == "eager"


def test_a_stop_string_that_is_a_special_piece_ends_the_text(model: Model) -> None:
    """Special pieces are not part of the returned text."""
    id, special = next(iter(model.text._tokenizer.get_added_tokens_decoder().items()))
    decode = DecodeConfig("plain", max_new_tokens=6, stop=[special.content[1:]])
    result = outcomes(model, "import os\n", decode, processors=always(id))
    assert result == [([id], "")]


def test_k_fits_the_diverse_ids_and_the_context(model: Model) -> None:
    diverse = Methods(model.lm, MaskTokens((6, 7)), 3)
    other = replace(model, methods=diverse)
    with pytest.raises(UserError, match="decode.k must be 1 to 2 adaptive tokens"):
        generate(other, "x", DecodeConfig(k=3))
    near = [13 + id % 300 for id in range(context_length(model.lm.config) - 2)]
    target, *rest = [
        outcomes(model, [near, [20, 30]], DecodeConfig(method, max_new_tokens=2))
        for method in ("plain", "prompt_lookup", "sdsat", "hybrid")
    ]
    assert rest == [target] * 3


@pytest.mark.parametrize(
    ("chosen", "planner"),
    [
        ({}, MeasuredPlanner),
        ({"k": 2}, MeasuredPlanner),
        ({"probes": "all", "k": 2}, FixedPlanner),
        ({"probes": "root", "nodes": 9}, FixedPlanner),
        ({"sources": ["text"]}, MeasuredPlanner),
        ({"sources": ["text"], "nodes": 9}, FixedPlanner),
    ],
)
def test_nodes_and_probes_fix_the_tree_and_k_does_not(
    model: Model, chosen: dict[str, Any], planner: type
) -> None:
    """Regression: decode.k of n-grams switched from measured costs to a fixed chain."""
    decode = DecodeConfig("hybrid", **chosen)
    drafters = model.methods.drafters(decode, batch=1, capacity=64, left=99)
    assert isinstance(drafters, SourceDrafters)
    assert isinstance(drafters._planner, planner)


def test_out_of_memory_says_what_to_lower(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("infer.engine.runner.Runner.forward", full)
    with pytest.raises(UserError, match="out of memory.* [Ll]ower decode.max_new"):
        next(generate(model, "x", DecodeConfig("plain")))


def test_a_caller_that_reads_no_further_keeps_the_runner(model: Model) -> None:
    """Bug: a GPU captured all its graphs again for the next text."""
    with patch.object(Runners, "give") as give:
        steps = generate(model, "def", DecodeConfig("plain", max_new_tokens=8))
        next(steps)
        steps.close()  # type: ignore[attr-defined]
    give.assert_called_once()


def test_prompts_and_seeds_of_every_kind(model: Model) -> None:
    decode = DecodeConfig(max_new_tokens=4)
    one = outcomes(model, [20, 30], decode)
    prompts: list[Any] = [np.array([20, 30]), iter([20, 30])]
    for prompt in prompts:
        assert outcomes(model, prompt, decode, seeds=np.array([0])) == one
    assert outcomes(model, torch.tensor([[20, 30], [20, 30]]), decode) == one * 2


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (3, {}, "prompt must be a text, an Infill or token ids, got int"),
        (["x", None], {}, r"prompts\[1\] must be a text, .* got NoneType"),
        ([1.5, 2.0], {}, "prompt must be token ids of the model, .* got 1.5"),
        ([3, 400], {}, "integers from 0 to 399, got 400"),
        ("", {}, "prompt must have at least one token, got ''"),
        ("\udcff", {}, "prompt must be text in UTF-8, got other bytes"),
        ([9] * 500, {}, r"the model's context of 512 tokens, got 500 \+ 256"),
        ("x", {"decode": DecodeConfig(depth=3)}, "decode.depth .* got "),
        ("x", {"seeds": [-1]}, "seeds must be"),
        ("x", {"seeds": [1, 2]}, "seeds must be"),
        ("x", {"seeds": 5}, "seeds must be 1 integers .* got 5"),
    ],
)
def test_mistakes_before_anything_is_decoded(
    model: Model, prompts: Any, options: dict[str, Any], message: str
) -> None:
    """Bug: seeds=5 was answered by "seeds must be a text, an Infill or token ids"."""
    with pytest.raises(UserError, match=message):
        generate(model, prompts, **options)


@pytest.mark.parametrize("draft", ["", "self:0"])
def test_a_draft_that_cannot_be_is_a_users_error(draft: str, model_dir: Path) -> None:
    with pytest.raises(UserError, match="draft must be"):
        load(model_dir, "float32", draft=draft)


def test_dtype_and_device_of_torch(model_dir: Path) -> None:
    """Bugs: "device must be one of cpu, got cpu", and a wrong dtype was a model without weights."""
    lm = load(model_dir, torch.float32, torch.device("cpu")).lm
    assert (lm.dtype, lm.device.type) == (torch.float32, "cpu")
    with pytest.raises(UserError, match="dtype must be auto, float32, .* got 'int4'"):
        load(model_dir, "int4")
