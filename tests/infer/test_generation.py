"""Test that generation_config.json applies in the same way in every decoder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from conf.errors import UserError
from infer import DecodeConfig, Model, generate, load
from infer.api import _log_once
from infer.bench.peers import peer_decoders
from infer.bench.prompts import Prompt
from tests.infer.library import drafting, tokens_of

PROMPT = [20, 30, 40, 51]
NEW = 24
ENDS = {"eos_token_id": [1, *range(13, 400, 7)]}
FIELDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "suppressed": {
        "suppress_tokens": list(range(50, 90)),
        "begin_suppress_tokens": list(range(50, 400, 50)),
        "bad_words_ids": [[100], [150, 200]],
    },
    "lengths": {**ENDS, "min_new_tokens": 5, "min_length": 12},
    "ends": {**ENDS, "exponential_decay_length_penalty": [2, 1.2]},
    "bias": {
        "sequence_bias": [[[100], -2.0], [[150], 2.0]],
        "encoder_repetition_penalty": 1.5,
        "forced_eos_token_id": 1,
    },
}


@pytest.fixture
def directory(model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that returns the model directory with generation settings."""

    def write(**fields: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(model_dir, folder, dirs_exist_ok=True)
        content = {"bos_token_id": 0, "eos_token_id": 1, **fields}
        (folder / "generation_config.json").write_text(json.dumps(content))
        return folder

    return write


def greedy(model: Model, method: str = "plain", **decode: Any) -> list[int]:
    config = DecodeConfig(method, max_new_tokens=NEW, **decode)
    return tokens_of(model, [PROMPT], config)[0]


@pytest.mark.parametrize("name", FIELDS)
def test_infer_bench_and_transformers_give_one_text(
    name: str, directory: Callable[..., Path], model: Model
) -> None:
    """Regression: custom_generate applied the directory's penalties, infer and infer.bench did not."""
    folder = directory(**FIELDS[name])
    lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    args = {"max_new_tokens": NEW, "do_sample": False}
    expected = lm.generate(torch.tensor([PROMPT]), **args)[0, len(PROMPT) :].tolist()
    own = load(folder, "float32")
    assert own.adaptive and expected != greedy(model)
    for method in ("plain", "hybrid", "sdsat"):
        assert greedy(own, method) == expected, method
    portable = drafting(lm, *own.adaptive.ids)(torch.tensor([PROMPT]), **args)
    assert portable[0, len(PROMPT) :].tolist() == expected
    plain = DecodeConfig("plain", max_new_tokens=NEW)
    peers = peer_decoders(own, plain, ["generate", "prompt_lookup"], seed=0)
    for peer in peers.values():
        assert peer(Prompt("a", PROMPT)).tokens == expected


def test_settings_take_the_place_of_the_directorys(
    directory: Callable[..., Path], model: Model
) -> None:
    fields = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    own = load(directory(**fields, min_new_tokens=3), "float32")
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    assert greedy(own) != greedy(own, **neutral) == greedy(model)
    assert greedy(own, repetition_penalty=1.0) == greedy(model, no_repeat_ngram_size=2)
    assert greedy(own) == greedy(model, **fields)


def test_stop_strings_end_a_text(directory: Callable[..., Path], model: Model) -> None:
    whole = greedy(model)
    stop = model.text.decode(whole)[4:7]
    own = load(directory(stop_strings=[stop]), "float32")
    # Bug: the peers wrote on after these strings, and were compared with shorter texts.
    assert not peer_decoders(own, DecodeConfig("plain"), ["generate"], seed=0)
    short = greedy(model, stop=[stop])
    assert greedy(own) == greedy(own, "hybrid") == short != whole
    assert greedy(own, stop=["never"]) == whole


def test_a_stop_string_may_begin_in_the_prompt(model: Model, model_dir: Path) -> None:
    """Regression: the library ended such a text and infer did not."""
    lm: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    file = str(model_dir / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
    special = max(model.text.special_pieces())
    asked = ("def f(x):\n", "class A:\n    def")
    prompts = [model.text.encode(text) for text in asked]
    prompts.append([*prompts[0], special])
    plain = DecodeConfig("plain", max_new_tokens=NEW)
    news = tokens_of(model, prompts, plain)
    for prompt, tokens in zip(prompts, news):
        old = tokenizer.decode(prompt)
        new = model.text.decode(tokens).partition("\ufffd")[0]
        cuts = {(1, 1), (4, 1), (3, 3), (1, len(new)), (4, 0)}
        for before, after in sorted(cuts):
            stop = [old[-before:] + new[:after], "never"]
            if after > len(new):
                continue
            args = {"stop_strings": stop, "tokenizer": tokenizer}
            args |= {"max_new_tokens": NEW, "do_sample": False}
            expected = [lm.generate(torch.tensor([p]), **args)[0] for p in prompts]
            texts = [t[len(p) :].tolist() for t, p in zip(expected, prompts)]
            for method in ("plain", "hybrid"):
                decode = DecodeConfig(method, max_new_tokens=NEW, stop=stop)
                steps = list(generate(model, prompts, decode))
                for index, text in enumerate(texts):
                    own = [step for step in steps if step.sequence == index]
                    assert [t for step in own for t in step.tokens] == text, stop
                    stream = model.text.stream(opens=False)
                    shown = "".join(map(stream, text)) + stream.rest()
                    assert "".join(step.text for step in own) == shown


def test_what_is_not_applied_is_said_once(
    directory: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    _log_once.cache_clear()
    fields = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}
    folder = directory(**fields, num_beams=4, use_cache=True, repetition_penalty=1.1)
    for _ in range(2):
        load(folder, "float32")
    (message,) = caplog.messages
    assert message == (
        f"{folder}/generation_config.json: not applied: do_sample=True, temperature=0.6, "
        "top_p=0.9, max_length=4096 (use settings such as decode.temperature and "
        "decode.max_new_tokens); num_beams=4 (not supported by this decoder)"
    )
    caplog.clear()
    load(
        directory(temperature=0.6, num_beams=1), "float32"
    )  # the library is greedy too
    assert not caplog.messages


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": "x"},
        {"repetition_penalty": -1},
        {"repetition_penalty": float("nan")},
        {"min_new_tokens": "a"},
        {"bad_words_ids": [[10**6]]},
        {"exponential_decay_length_penalty": [1]},
        {"sequence_bias": [[[20], float("inf")]]},
        {"stop_strings": [""]},
        {"forced_eos_token_id": 10**6},  # it acts only on the last token
        {"forced_bos_token_id": 10**6},  # it acts only on the first
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_values_that_cannot_be_applied_are_refused_at_load(
    fields: dict[str, Any], directory: Callable[..., Path]
) -> None:
    with pytest.raises(
        UserError, match=r"generation_config.json must have settings th"
    ):
        load(directory(**fields), "float32")
