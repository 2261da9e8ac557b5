"""load and generate: every method is plain decoding, every row its single run, every mistake a sentence."""

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
from infer.drafters.adaptive import FixedPolicy
from infer.drafters.cost_tables import CostTables
from infer.drafters.costs import Costs, LoopCosts
from infer.engine.forward import context_length
from infer.methods import Methods
from infer.requests import Prompt
from tests.infer.library import left_padded

METHODS = {
    "prompt_lookup": {"method": "prompt_lookup", "k": 4},
    "ngrams": {"method": "ngrams", "k": 4},
    "adaptive tokens alone": {
        "method": "hybrid",
        "sources": ["adaptive"],
        "k": 3,
        "probes": "all",
    },
    "two forwards": {"method": "hybrid", "k": 3, "probes": "root"},
    "one forward": {"method": "hybrid", "k": 2, "probes": "all"},
    "tree": {"method": "hybrid", "k": 4, "probes": "2", "nodes": 8, "width": 3},
    "auto": {"method": "hybrid"},
}
IDS = st.lists(st.integers(13, 399), min_size=1, max_size=12)


def outcomes(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    decode: DecodeConfig,
    **more: object,
) -> list[tuple[list[int], str]]:
    """The tokens and the text of every prompt."""
    steps = list(generate(model, prompts, decode, **more))  # type: ignore[arg-type]
    result = []
    for index in range(1 + max(step.sequence for step in steps)):
        mine = [step for step in steps if step.sequence == index]
        assert [step.finished for step in mine] == [False] * (len(mine) - 1) + [True]
        assert all(len(step.texts) == len(step.tokens) > 0 for step in mine)
        assert all(
            0 <= step.accepted <= min(step.drafted, len(step.tokens)) for step in mine
        )
        tokens = [token for step in mine for token in step.tokens]
        result.append((tokens, "".join(step.text for step in mine)))
    return result


@settings(max_examples=15)
@given(st.data())
def test_every_method_ends_and_chooses_as_plain_decoding_does(
    model: Model, data: st.DataObject
) -> None:
    """Stop strings and EOS out of the text itself, limits and processors, greedy and sampled."""
    prompts = data.draw(st.lists(IDS, min_size=1, max_size=3))
    new = data.draw(st.integers(1, 30))
    plain = DecodeConfig(
        "plain",
        temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        seed=data.draw(st.integers(0, 9)),
        max_new_tokens=new,
        min_new_tokens=data.draw(st.sampled_from([0, new // 2, new])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.0, 1.3])),
        no_repeat_ngram_size=data.draw(st.sampled_from([0, 0, 2])),
    )
    tokens, text = outcomes(model, prompts[0], plain)[0]
    if len(text) > 1 and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(text) - 2))
        plain = replace(
            plain,
            stop=[text[start : start + data.draw(st.integers(1, 4))], "never there"],
        )
    if data.draw(st.booleans()):
        model = replace(model, eos=frozenset([1, data.draw(st.sampled_from(tokens))]))
    target = [outcomes(model, prompt, plain)[0] for prompt in prompts]
    for settings_ in [{"method": "plain"}, *METHODS.values()]:
        assert outcomes(model, prompts, replace(plain, **settings_)) == target, (
            settings_
        )
    for tokens, _ in target:
        assert plain.min_new_tokens <= len(tokens) <= new or plain.stop
        assert not model.eos & set(tokens[:-1])
        stream = model.text.stream(opens=False)
        before = "".join(map(stream, tokens[:-1]))
        assert not any(stop in before for stop in plain.stop)


@pytest.mark.parametrize("name", METHODS)
def test_a_stop_string_within_an_accepted_draft_ends_the_text(
    model: Model, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts come true in these tests, and what was accepted behind the end is not emitted."""
    monkeypatch.setattr(
        LoopCosts, "observe", lambda self, q, ms, answered=False: self(q) / self(1)
    )
    monkeypatch.setattr(
        CostTables, "load", lambda self: [Costs((1, 64), (10.0, 11.0))] * 2
    )
    model = replace(
        model, methods=Methods(model.lm, model.adaptive, model.methods._draft_methods)
    )
    decode = DecodeConfig(max_new_tokens=200, **METHODS[name])
    steps = list(generate(model, [20, 30], decode))
    assert sum(step.accepted for step in steps) > 5
    at = next(
        i
        for i, step in enumerate(steps)
        if step.accepted and step.texts[0] and step.texts[1]
    )
    before = [token for step in steps[:at] for token in step.tokens]
    stop = "".join(step.text for step in steps[:at]) + steps[at].texts[0]
    result = list(generate(model, [20, 30], replace(decode, stop=[stop])))
    assert [token for step in result for token in step.tokens] == [
        *before,
        steps[at].tokens[0],
    ]
    assert "".join(step.text for step in result) == stop
    if decode.method in (None, "hybrid", "ngrams") and decode.probes == "auto":
        return  # it drafts by the clock, not the same in every run
    assert result[-1].accepted == 1


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 25},
        {
            "repetition_penalty": 0.8,
            "no_repeat_ngram_size": 3,
            "min_new_tokens": 10,
            "stop": ["20th"],
        },
    ],
    ids=lambda chosen: ", ".join(chosen) or "greedy",
)
def test_it_is_what_the_librarys_generate_gives(model: Model, chosen: dict) -> None:
    prompt, words = model.text.encode("def f(x):\n"), chosen
    bad = LogitsProcessorList(
        [NoBadWordsLogitsProcessor([[77], [20, 30]], sorted(model.eos))]
    )
    if "stop" in chosen:
        free = DecodeConfig(max_new_tokens=40, **chosen | {"stop": []})
        tokens = outcomes(model, prompt, free, processors=bad)[0][0]
        late = next(
            filter(str.isascii, (model.text.decode([id]) for id in tokens[12:30]))
        )
        chosen = chosen | {"stop": ["never there", late]}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=model.text._tokenizer)
        words = {k: v for k, v in chosen.items() if k != "stop"}
        words |= {"stop_strings": chosen["stop"], "tokenizer": tokenizer}
    args: dict = left_padded([prompt]) | {
        "do_sample": False,
        "max_new_tokens": 40,
        "pad_token_id": 1,
    }
    result = model.lm.generate(**args, bad_words_ids=[[77], [20, 30]], **words)
    tokens = result[0, len(prompt) :].tolist()
    decode = DecodeConfig(max_new_tokens=40, **chosen)
    assert outcomes(model, prompt, decode, processors=bad)[0][0] == tokens
    assert ("stop" in chosen) == (len(tokens) < 40)


def test_eight_rows_of_unequal_length_are_their_single_runs(model: Model) -> None:
    """Each with its seed, its own end and its own text; middles beside continuations."""
    rows: list[Prompt] = [
        "def f(x):\n",
        [0],
        "import os\n" * 9,
        Infill("a = ", "\nb"),
        "x",
    ]
    rows += [Infill("a = ", "\nb", "spm"), [5, 7, 9], Infill("", "tail", "spm")]
    decode = DecodeConfig(max_new_tokens=24, temperature=1.0, top_k=50, top_p=0.9)
    seeds = [3, 1, 4, 1, 5, 9, 2, 6]
    single = [
        outcomes(model, row, replace(decode, seed=seed))[0]
        for row, seed in zip(rows, seeds)
    ]
    assert outcomes(model, rows, decode, seeds=seeds) == single
    assert len({tuple(tokens) for tokens, _ in single}) == 8
    same = [outcomes(model, row, decode)[0] for row in rows]
    assert outcomes(model, rows, decode) == same


def test_eot_ends_a_middle_and_nothing_else(model: Model) -> None:
    always = LogitsProcessorList(
        [lambda ids, scores: scores.index_fill(1, torch.tensor([5]), 1e4)]
    )
    decode = DecodeConfig(max_new_tokens=6)
    rows: list[Prompt] = ["x = ", Infill("x = ", "\n"), Infill("x = ", "\n", "spm")]
    result = outcomes(model, rows, decode, processors=always)
    assert result == [([5] * 6, ""), ([5], ""), ([5], "")]
    # min_new_tokens holds EOT back, as it does EOS. (A caller's processor comes after it.)
    (tokens, _), *_ = outcomes(
        model, [Infill("x = ", "\n")], replace(decode, min_new_tokens=6)
    )
    assert 5 not in tokens[:5]


def test_without_adaptive_json_the_other_methods_work(base_dir, model: Model) -> None:
    base = load(base_dir, "float32")
    assert base.adaptive is None
    target = outcomes(model, "import os\n", DecodeConfig("plain", max_new_tokens=30))
    for decode in (
        DecodeConfig(),
        DecodeConfig("plain"),
        DecodeConfig("prompt_lookup"),
    ):
        assert (
            outcomes(base, "import os\n", replace(decode, max_new_tokens=30)) == target
        )
    with pytest.raises(UserError, match="decode.method=hybrid .* got no adaptive.json"):
        generate(base, "x", DecodeConfig("hybrid"))
    with pytest.raises(UserError, match="needs a model trained for infilling"):
        generate(base, Infill("a", "b"))


def test_numbers_beyond_any_tree_take_no_memory(model: Model) -> None:
    """decode.k=2^32 and decode.probes=1000000 took the memory of as many ids and probed nodes."""
    plain = outcomes(model, "x", DecodeConfig("plain", max_new_tokens=8))
    for chosen in ({"k": 2**32}, {"k": 3, "probes": 1_000_000}):
        assert outcomes(model, "x", DecodeConfig(max_new_tokens=8, **chosen)) == plain  # type: ignore[arg-type]
    assert FixedPolicy(3, 1_000_000).max_rows == FixedPolicy(3, "all").max_rows


def test_k_beyond_the_diverse_ids_is_refused(model: Model) -> None:
    diverse = replace(model.adaptive, ids=(6, 7))  # type: ignore[type-var]
    other = replace(
        model, adaptive=diverse, methods=type(model.methods)(model.lm, diverse)
    )
    with pytest.raises(
        UserError, match="decode.k must be 1 to 2 adaptive tokens, got 3"
    ):
        generate(other, "x", DecodeConfig(k=3))


def test_another_attention_of_the_model_changes_no_text(
    model: Model, monkeypatch
) -> None:
    """Eager attention adds a boolean mask to the scores, so another attention than ours was refused."""
    decode = DecodeConfig(k=3, max_new_tokens=12)
    expected = outcomes(model, "x", decode)
    monkeypatch.setattr(model.lm.config, "_attn_implementation", "eager")
    assert outcomes(model, "x", decode) == expected
    assert model.lm.config._attn_implementation == "eager"


def test_out_of_memory_says_what_to_lower(model: Model, model_dir, monkeypatch) -> None:
    """The first from PyTorch's own allocator."""
    endless = replace(model, context=2**50)
    with pytest.raises(UserError, match="out of memory: .*Lower decode.max_new_tokens"):
        generate(endless, "x", DecodeConfig("plain", max_new_tokens=2**40))
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.\nMore."))
    steps = generate(model, "x", DecodeConfig("plain"))
    monkeypatch.setattr("infer.engine.runner.Runner.forward", full)
    with pytest.raises(UserError, match="CUDA out of memory. More.. Lower decode"):
        next(steps)
    full.side_effect = RuntimeError("shape mismatch")
    with pytest.raises(RuntimeError, match="shape mismatch"):
        next(generate(model, "x", DecodeConfig("plain")))
    full.side_effect = torch.OutOfMemoryError
    monkeypatch.setattr("infer.models.checkpoint.check_tree", full)
    with pytest.raises(UserError, match="out of memory: .*Set dtype=bfloat16"):
        load(model_dir, "float32")
    with pytest.raises(
        UserError,
        match="dtype must be one of auto, float32, bfloat16, float16, got int8",
    ):
        load(model_dir, "int8")


def test_a_stop_string_that_is_a_special_piece_ends_the_text(model: Model) -> None:
    """Special pieces are no part of the text that is returned: with stop=["<|im_end|>"] it went on."""
    id, special = next(iter(model.text._tokenizer.get_added_tokens_decoder().items()))
    decode = DecodeConfig("plain", max_new_tokens=6, stop=[special.content[1:]])
    always = LogitsProcessorList(
        [lambda ids, scores: scores.index_fill(1, torch.tensor([id]), 1e4)]
    )
    assert outcomes(model, "import os\n", decode, processors=always) == [([id], "")]


def test_k_that_was_not_given_fits_the_context(model: Model) -> None:
    """Of one prompt near the longest length a whole batch was refused, for a k that nobody had asked for."""
    near = [13 + id % 300 for id in range(context_length(model.lm.config) - 2)]
    target = outcomes(model, [near, [20, 30]], DecodeConfig("plain", max_new_tokens=2))
    for chosen in (
        {"method": "prompt_lookup"},
        {"method": "hybrid", "probes": "root"},
        {"method": "hybrid"},
    ):
        assert (
            outcomes(model, [near, [20, 30]], DecodeConfig(max_new_tokens=2, **chosen))
            == target
        )  # type: ignore[arg-type]


def test_what_has_no_fixed_shapes_is_not_compiled(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compile=true was accepted, and did nothing, for a model over several ranks or of another architecture."""
    monkeypatch.setattr(type(model.lm), "device", torch.device("cuda"))
    check_compile(model.lm, True)
    monkeypatch.setattr(type(model.lm), "_can_compile_fullgraph", False)
    with pytest.raises(
        UserError,
        match="compile=true: the model must be whole .* fixed shapes, got llama",
    ):
        check_compile(model.lm, True)


IDS_ALONE = "must be token ids, whole numbers, got"
MISTAKES: list[tuple[Any, dict, str]] = [
    (3, {}, "prompt must be a text, an Infill or token ids, got int"),
    (None, {}, "prompt .* got NoneType"),
    (torch.tensor(3), {}, "prompt .* got Tensor"),
    (b"ab", {}, "prompt .* got bytes"),
    ({"input_ids": [3]}, {}, "prompt .* got dict"),
    (
        ["x", None],
        {},
        r"prompts\[1\] must be a text, an Infill or token ids, got NoneType",
    ),
    ([1.5, 2.0], {}, f"prompt {IDS_ALONE} 1.5"),
    ([3, "x"], {}, f"prompt {IDS_ALONE} 'x'"),
    (
        [3, None],
        {},
        f"prompt {IDS_ALONE} None",
    ),  # the mark for "nothing strange", it was taken as that
    (["x", torch.tensor([0.5])], {}, rf"prompts\[1\] {IDS_ALONE} 0.5"),
    ("", {}, "prompt must be a text or token ids, got nothing"),
    ([], {}, "prompt must be a text or token ids, got nothing"),
    (["x", ""], {}, r"prompts\[1\] must be a text or token ids, got nothing"),
    (Infill(), {}, "prompt must have a prefix or a suffix, got neither"),
    ("\udcff", {}, "prompt must be text in UTF-8, got other bytes"),
    (["x"] * 9, {}, "prompts must be 1 to 8 side by side, got 9"),
    ([3, 400], {}, "prompt must be ids of the model's vocabulary, 0 to 399, got 400"),
    (
        [[3], [-1]],
        {},
        r"prompts\[1\] must be ids of the model's vocabulary, 0 to 399, got -1",
    ),
    (
        [9] * 512,
        {},
        "prompt must have fewer tokens than the model's context of 512, got 512",
    ),
    ([9] * 500, {}, r"max_new_tokens must be at most 12 .* context of 512, got 256"),
    (
        [9] * 508,
        {"max_new_tokens": 4, "method": "prompt_lookup", "k": 5},
        "decode.k must be at most the 4 ",
    ),
    (
        [9] * 508,
        {"max_new_tokens": 4, "k": 5, "probes": "all"},
        "decode.k must be at most the 4 tokens",
    ),
    # Where no method was given, what it does not have was taken and ignored.
    (
        "x",
        {"depth": 3, "theta_prob": 0.4},
        r"decode.depth needs decode.method=ssd\|.* got hybrid",
    ),
]


@pytest.mark.parametrize(
    ("prompts", "chosen", "sentence"), MISTAKES, ids=[m[2][:40] for m in MISTAKES]
)
def test_a_mistake_is_one_sentence_before_anything_is_decoded(
    model: Model, prompts: Any, chosen: dict, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as message:
        generate(model, prompts, DecodeConfig(**chosen))
    assert "\n" not in str(message.value)


def test_prompts_and_seeds_of_every_kind(model: Model) -> None:
    """A tensor of ids failed with "len() of a 0-d tensor"."""
    decode = DecodeConfig(max_new_tokens=4)
    item = outcomes(model, [20, 30], decode)
    for prompt in (
        torch.tensor([20, 30]),
        np.array([20, 30]),
        (20, 30),
        iter([20, 30]),
        [np.int64(20), 30],
    ):
        assert outcomes(model, prompt, decode, seeds=np.array([0])) == item
    two = outcomes(model, ["a", "b"], decode)
    assert (
        outcomes(
            model, (text for text in "ab"), decode, seeds=(seed for seed in (0, 0))
        )
        == two
    )
    assert outcomes(model, torch.tensor([[20, 30], [20, 30]]), decode) == item * 2
    with pytest.raises(
        UserError, match=r"seeds must be one .* for each of 2 prompts, got \[1\]"
    ):
        generate(model, ["x", "y"], seeds=[1])
    for seeds in (5, [1.5], [-1], "1", [], [1, 2]):
        with pytest.raises(
            UserError,
            match="seeds must be one of up to 63 bits for each of 1 prompts, got",
        ):
            generate(model, "x", decode, seeds=seeds)  # type: ignore[arg-type]


def test_scores_beyond_all_numbers(model: Model) -> None:
    """A penalty of 1e-320 makes infinite scores, whose shares are no numbers."""
    given = {"max_new_tokens": 8, "repetition_penalty": 1e-320}
    plain = outcomes(model, [20, 30], DecodeConfig("plain", **given))  # type: ignore[arg-type]
    assert outcomes(model, [20, 30], DecodeConfig("hybrid", **given)) == plain  # type: ignore[arg-type]
