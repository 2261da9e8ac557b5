"""Prompts and seeds as callers have them; what they cannot mean is one sentence before anything is decoded."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from conf import UserError
from infer import DecodeConfig, Infill, Model, generate
from infer.requests import Prompt
from tests.infer.test_api import outcomes

MISTAKES: list[tuple[Prompt | Sequence[Prompt], dict, str]] = [
    ("", {}, "prompt must be a text or token ids, got nothing"),
    ([], {}, "prompt must be a text or token ids, got nothing"),
    (["x", ""], {}, r"prompts\[1\] must be a text or token ids, got nothing"),
    (Infill(), {}, "prompt must have a prefix or a suffix, got neither"),
    ("\udcff", {}, "prompt must be text in UTF-8, got other bytes"),
    (["x"] * 9, {}, "prompts must be 1 to 8 side by side, got 9"),
    ([3, 400], {}, "prompt must be ids of the model's vocabulary, 0 to 399, got 400"),
    ([[3], [-1]], {}, r"prompts\[1\] must be ids of the model's vocabulary, 0 to 399, got -1"),
    ([9] * 512, {}, "prompt must have fewer tokens than the model's context of 512, got 512"),
    ([9] * 500, {}, r"max_new_tokens must be at most 12 .* context of 512, got 256"),
    ([9] * 508, {"max_new_tokens": 4, "method": "prompt_lookup", "k": 5}, "decode.k must be at most the 4 "),
    ([9] * 508, {"max_new_tokens": 4, "k": 5, "probes": "all"}, "decode.k must be at most the 4 tokens"),
]


@pytest.mark.parametrize(("prompts", "chosen", "sentence"), MISTAKES, ids=[m[2][:40] for m in MISTAKES])
def test_a_mistake_is_one_sentence_before_anything_is_decoded(
    model: Model, prompts: Prompt | Sequence[Prompt], chosen: dict, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as message:
        generate(model, prompts, DecodeConfig(**chosen))
    assert "\n" not in str(message.value)


def test_prompts_and_seeds_of_every_kind(model: Model) -> None:
    """A tensor of ids failed with "len() of a 0-d tensor", and a generator was empty once it had been
    looked at; numbers, None and ids that are none ended in a TypeError; a seed of 1.5 was taken.
    """
    decode = DecodeConfig(max_new_tokens=4)
    item = outcomes(model, [20, 30], decode)
    for prompt in (torch.tensor([20, 30]), np.array([20, 30]), (20, 30), iter([20, 30]), [np.int64(20), 30]):
        assert outcomes(model, prompt, decode, seeds=np.array([0])) == item
    two = outcomes(model, ["a", "b"], decode)
    assert outcomes(model, (text for text in "ab"), decode, seeds=(seed for seed in (0, 0))) == two
    assert outcomes(model, torch.tensor([[20, 30], [20, 30]]), decode) == item * 2
    for wrong, sentence in [
        (3, "prompt must be a text, an Infill or token ids, got int"),
        (None, "prompt .* got NoneType"),
        (torch.tensor(3), "prompt .* got Tensor"),
        (b"ab", "prompt .* got bytes"),
        ({"input_ids": [3]}, "prompt .* got dict"),
        (["x", None], r"prompts\[1\] must be a text, an Infill or token ids, got NoneType"),
        ([1.5, 2.0], "prompt must be token ids, whole numbers, got 1.5"),
        ([3, "x"], "prompt must be token ids, whole numbers, got 'x'"),
        # None, the mark for "nothing strange", was taken as that: a TypeError of int() came.
        ([3, None], "prompt must be token ids, whole numbers, got None"),
        (["x", torch.tensor([0.5])], r"prompts\[1\] must be token ids, whole numbers, got 0.5"),
    ]:
        with pytest.raises(UserError, match=sentence):
            generate(model, wrong, decode)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"seeds must be one .* for each of 2 prompts, got \[1\]"):
        generate(model, ["x", "y"], seeds=[1])
    for seeds in (5, [1.5], [-1], "1", [], [1, 2]):
        with pytest.raises(UserError, match="seeds must be one of up to 63 bits for each of 1 prompts, got"):
            generate(model, "x", decode, seeds=seeds)  # type: ignore[arg-type]


def test_settings_of_every_type(model: Model) -> None:
    """A penalty of 2 for 2.0 was a ValueError of the library's in the middle of a call, a text for a number a
    TypeError, and 2.5 drafts in a row were taken.
    """
    plain = outcomes(model, [20, 30], DecodeConfig(max_new_tokens=4, repetition_penalty=2.0))
    given = {
        "max_new_tokens": np.int64(4),
        "repetition_penalty": 2,
        "k": torch.tensor(2).item(),
        "stop": ("xyz",),
    }
    assert outcomes(model, [20, 30], DecodeConfig("sdsat", **given)) == plain  # type: ignore[arg-type]
    for wrong, sentence in [
        ({"k": 2.5}, "decode.k must be a whole number, got 2.5"),
        ({"max_new_tokens": "5"}, "decode.max_new_tokens must be a whole number, got '5'"),
        ({"max_new_tokens": None}, "decode.max_new_tokens must be a whole number, got None"),
        ({"max_new_tokens": True}, "decode.max_new_tokens must be a whole number, got True"),
        ({"temperature": [1]}, r"decode.temperature must be a number, got \[1\]"),
        ({"temperature": 10**400}, r"decode.temperature must be a finite number, got 10000"),
        ({"tree": 1}, "decode.tree must be a text, got 1"),
        ({"stop": "end"}, "decode.stop must be a list of texts, got 'end'"),
        ({"method": 3}, "decode.method must be a text, got 3"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            DecodeConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="infill.prefix must be a text, got 5"):
        Infill(5)  # type: ignore[arg-type]


def test_scores_beyond_all_numbers(model: Model) -> None:
    """A penalty of 1e-320 makes infinite scores, whose shares are no numbers: the policy that learns from them
    ended in a ValueError. Weights of a damaged adapter did the same.
    """
    given = {"max_new_tokens": 8, "repetition_penalty": 1e-320}
    plain = outcomes(model, [20, 30], DecodeConfig("plain", **given))  # type: ignore[arg-type]
    assert outcomes(model, [20, 30], DecodeConfig("sdsat", **given)) == plain  # type: ignore[arg-type]
