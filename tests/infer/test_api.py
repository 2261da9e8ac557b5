"""load and generate: every method is plain decoding, every row its single run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PreTrainedTokenizerFast,
)

from conf import UserError
from infer import DecodeConfig, Infill, Model, generate, load
from infer.api import check_compile
from infer.drafters.source_methods import SourceMethods
from infer.engine.forward import context_length
from infer.methods import Methods
from infer.requests import Prompt
from tests.infer.library import left_padded

METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"method": "prompt_lookup", "k": 4},
    "ngrams": {"method": "ngrams", "k": 4},
    "adaptive tokens alone": {
        "method": "hybrid",
        "sources": ["adaptive"],
        "k": 3,
        "probes": "all",
    },
    "the paper": {"method": "sdsat", "k": 3},
    "two forwards": {"method": "hybrid", "k": 3, "probes": "root"},
    "one forward": {"method": "hybrid", "k": 2, "probes": "all"},
    "some probes": {"method": "hybrid", "k": 4, "probes": 2},
    "tree": {"method": "sdsat", "k": 4, "probes": 2, "tree": "paper"},
    "measured": {"method": "hybrid"},
}
IDS = st.lists(st.integers(13, 399), min_size=1, max_size=12)


def outcomes(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    decode: DecodeConfig,
    **options: Any,
) -> list[tuple[list[int], str]]:
    """The tokens and the text of every prompt."""
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
    """Make one id the likeliest everywhere."""
    return LogitsProcessorList(
        [lambda ids, scores: scores.index_fill(1, torch.tensor([id]), 1e4)]
    )


@settings(max_examples=15)
@given(st.data())
def test_every_method_ends_and_chooses_as_plain_decoding_does(
    model: Model, data: st.DataObject
) -> None:
    """Stop strings and EOS of the text itself, limits, processors, greedy and sampled."""
    prompts = data.draw(st.lists(IDS, min_size=1, max_size=3))
    new = data.draw(st.integers(1, 30))
    plain = DecodeConfig(
        "plain",
        temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
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
    for method in [{"method": "plain"}, *METHODS.values()]:
        assert outcomes(model, prompts, replace(plain, **method)) == target, method
    for tokens, _ in target:
        assert plain.min_new_tokens <= len(tokens) <= new or plain.stop
        assert not model.eos & set(tokens[:-1])
        stream = model.text.stream(opens=False)
        before = "".join(map(stream, tokens[:-1]))
        assert not any(stop in before for stop in plain.stop)


def test_a_stop_string_within_an_accepted_draft_ends_the_text(model: Model) -> None:
    """Tokens that were accepted after the end are not emitted."""
    decode = DecodeConfig(max_new_tokens=200, **METHODS["one forward"])
    steps = list(generate(model, [20, 30], decode))
    at, step = next(
        (i, step)
        for i, step in enumerate(steps)
        if step.accepted and step.texts[0] and step.texts[1]
    )
    stop = "".join(step.text for step in steps[:at]) + step.texts[0]
    result = list(generate(model, [20, 30], replace(decode, stop=[stop])))
    assert [step.tokens for step in result[:-1]] == [step.tokens for step in steps[:at]]
    assert result[-1].tokens == step.tokens[:1] and result[-1].accepted == 1
    assert "".join(step.text for step in result) == stop


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 25},
        {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "stop": ["20th"]},
    ],
    ids=lambda chosen: ", ".join(chosen) or "greedy",
)
def test_it_is_the_librarys_generate(model: Model, chosen: dict[str, Any]) -> None:
    prompt = model.text.encode("def f(x):\n")
    bad_words = [[77], [20, 30]]
    bad = NoBadWordsLogitsProcessor(bad_words, sorted(model.eos))
    processors = LogitsProcessorList([bad])
    by_library = dict(chosen)
    if by_library.pop("stop", None):
        free = DecodeConfig(max_new_tokens=40, **by_library)
        tokens = outcomes(model, prompt, free, processors=processors)[0][0]
        pieces = (model.text.decode([id]) for id in tokens[12:30])
        chosen = chosen | {"stop": ["never there", next(filter(str.isascii, pieces))]}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=model.text._tokenizer)
        by_library |= {"stop_strings": chosen["stop"], "tokenizer": tokenizer}
    args: dict[str, Any] = left_padded([prompt]) | by_library
    args |= {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 1}
    tokens = model.lm.generate(**args, bad_words_ids=bad_words)[0, len(prompt) :]
    decode = DecodeConfig(max_new_tokens=40, **chosen)
    result = outcomes(model, prompt, decode, processors=processors)
    assert result[0][0] == tokens.tolist()
    assert ("stop" in chosen) == (len(tokens) < 40)


def test_ten_rows_of_unequal_length_are_their_single_runs(model: Model) -> None:
    """Each with its seed, its own end and its own text; middles beside continuations."""
    rows: list[Prompt] = [
        "def f(x):\n",
        [0],
        "import os\n" * 9,
        Infill("a = ", "\nb"),
        "x",
        Infill("a = ", "\nb", "spm"),
        [5, 7, 9],
        Infill("", "tail", "spm"),
        [20, 30],
        "y",
    ]
    decode = DecodeConfig(max_new_tokens=24, temperature=1.0, top_k=50, top_p=0.9)
    seeds = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    single = [
        outcomes(model, row, replace(decode, seed=seed))[0]
        for row, seed in zip(rows, seeds)
    ]
    assert outcomes(model, rows, decode, seeds=seeds) == single
    assert len({tuple(tokens) for tokens, _ in single}) == 10


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
    with pytest.raises(UserError, match="needs a model trained for infilling"):
        generate(base, Infill("a", "b"))


def test_k_fits_the_diverse_ids_and_the_context(model: Model) -> None:
    diverse = Methods(SourceMethods(model.lm, (6, 7), 3))
    other = replace(model, methods=diverse)
    with pytest.raises(UserError, match="decode.k must be 1 to 2 adaptive tokens"):
        generate(other, "x", DecodeConfig(k=3))
    near = [13 + id % 300 for id in range(context_length(model.lm.config) - 2)]
    prompts = [near, [20, 30]]
    target = outcomes(model, prompts, DecodeConfig("plain", max_new_tokens=2))
    for method in ("prompt_lookup", "sdsat", "hybrid"):
        decode = DecodeConfig(method, max_new_tokens=2)
        assert outcomes(model, prompts, decode) == target
    plain = outcomes(model, "x", DecodeConfig("plain", max_new_tokens=8))
    # More than any memory holds.
    assert outcomes(model, "x", DecodeConfig(max_new_tokens=8, k=2**32)) == plain


def test_another_attention_of_the_model_changes_no_text(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention adds a boolean mask to the scores."""
    decode = DecodeConfig(k=3, max_new_tokens=12)
    expected = outcomes(model, "x", decode)
    monkeypatch.setattr(model.lm.config, "_attn_implementation", "eager")
    assert outcomes(model, "x", decode) == expected
    assert model.lm.config._attn_implementation == "eager"


def test_out_of_memory_says_what_to_lower(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error comes from PyTorch's own allocator."""
    endless = replace(model, context=2**50)
    with pytest.raises(UserError, match="out of memory.* [Ll]ower decode.max_new"):
        generate(endless, "x", DecodeConfig("plain", max_new_tokens=2**40))
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("infer.engine.runner.Runner.forward", full)
    with pytest.raises(UserError, match="out of memory.* [Ll]ower decode.max_new"):
        next(generate(model, "x", DecodeConfig("plain")))
    full.side_effect = RuntimeError("shape mismatch")
    with pytest.raises(RuntimeError, match="shape mismatch"):
        next(generate(model, "x", DecodeConfig("plain")))


def test_a_stop_string_that_is_a_special_piece_ends_the_text(model: Model) -> None:
    """Special pieces are no part of the text that is returned."""
    id, special = next(iter(model.text._tokenizer.get_added_tokens_decoder().items()))
    decode = DecodeConfig("plain", max_new_tokens=6, stop=[special.content[1:]])
    result = outcomes(model, "import os\n", decode, processors=always(id))
    assert result == [([id], "")]


def test_only_fixed_shapes_on_a_gpu_are_compiled(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="compile=true needs .*, got llama on cpu"):
        check_compile(model.lm, True)
    monkeypatch.setattr(type(model.lm), "device", torch.device("cuda"))
    check_compile(model.lm, True)
    monkeypatch.setattr(type(model.lm), "_can_compile_fullgraph", False)
    with pytest.raises(UserError, match="compile=true needs .*, got llama on cuda"):
        check_compile(model.lm, True)


def test_prompts_and_seeds_of_every_kind(model: Model) -> None:
    decode = DecodeConfig(max_new_tokens=4)
    one = outcomes(model, [20, 30], decode)
    prompts: list[Any] = [torch.tensor([20, 30]), np.array([20, 30]), (20, 30)]
    for prompt in [*prompts, iter([20, 30]), [np.int64(20), 30]]:
        assert outcomes(model, prompt, decode, seeds=np.array([0])) == one
    assert outcomes(model, torch.tensor([[20, 30], [20, 30]]), decode) == one * 2
    two = outcomes(model, ["a", "b"], decode)
    assert outcomes(model, (text for text in "ab"), decode, seeds=iter([0, 0])) == two


TYPES = "must be a text, an Infill or token ids, got"
IDS_ALONE = "must be token ids of the model, whole numbers from 0 to 399, got"
MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (3, {}, f"prompt {TYPES} int"),
    (b"ab", {}, f"prompt {TYPES} bytes"),
    ({"input_ids": [3]}, {}, f"prompt {TYPES} dict"),
    (["x", None], {}, rf"prompts\[1\] {TYPES} NoneType"),
    ([1.5, 2.0], {}, f"prompt {IDS_ALONE} 1.5"),
    ([3, None], {}, f"prompt {IDS_ALONE} None"),
    ([[3], [-1]], {}, rf"prompts\[1\] {IDS_ALONE} -1"),
    ([3, 400], {}, f"prompt {IDS_ALONE} 400"),
    ("", {}, "prompt must have at least one token, got ''"),
    (["x", []], {}, r"prompts\[1\] must have at least one token"),
    ("\udcff", {}, "prompt must be text in UTF-8, got other bytes"),
    ([9] * 500, {}, r"must fit the model's context of 512 tokens, got 500 \+ 256"),
    ("x", {"depth": 3}, "decode.depth .* got "),
]


@pytest.mark.parametrize(
    ("prompts", "chosen", "message"), MISTAKES, ids=[m[2][:40] for m in MISTAKES]
)
def test_mistakes_before_anything_is_decoded(
    model: Model, prompts: Any, chosen: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(model, prompts, DecodeConfig(**chosen))


@pytest.mark.parametrize("seeds", [5, [1.5], [-1], "1", [], [1, 2]])
def test_seeds_that_do_not_fit(model: Model, seeds: Any) -> None:
    with pytest.raises(UserError, match="seeds must be"):
        generate(model, "x", seeds=seeds)
