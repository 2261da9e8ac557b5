"""Test an export in `transformers serve` with the OpenAI client."""

import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from tests.train.export.runs import export

if not is_serve_available():
    pytest.skip("transformers[serving] is not installed", allow_module_level=True)

from tests.served_openai import served, stream

EXAMPLES = Path(__file__).parents[3] / "examples"
PROMPTS = ["def parse(text):\n", "import json\n\n"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24}


@pytest.fixture(scope="module")
def model(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export in float32.

    Bug: chat answers of a Qwen began with the prompt (train.export.sidecars.completion_answer).
    """
    overrides = ("dtype=float32", "verify=false")
    out = tmp_path_factory.mktemp("served") / "model"
    return export(runs / "zero1-qwen2", out, *overrides)


@pytest.fixture(scope="module")
def api(model: Path) -> Iterator[Any]:
    script = EXAMPLES / "serve.sh"
    with served(model, model.with_name("server"), script=script) as client:
        yield client


def plain(model: Path, prompt: str) -> str:
    """Return the text of Transformers' own decoding."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = lm.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    text = ids[inputs.input_ids.shape[1] :]
    return tokenizer.decode(text, skip_special_tokens=True)


def test_two_streams_at_once_equal_plain_decoding(api: Any, model: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        texts = list(
            pool.map(lambda prompt: stream(api, model, prompt, **GREEDY), PROMPTS)
        )
    # A stream does not send the first bytes of a character.
    expected = [plain(model, prompt).rstrip("\ufffd") for prompt in PROMPTS]
    assert texts == expected and all(texts)


def test_a_chat_of_one_message_equals_its_completion(api: Any, model: Path) -> None:
    prompt = PROMPTS[0]
    name = str(model)
    expected = plain(model, prompt)
    message = {"role": "user", "content": prompt}
    chat = api.chat.completions.create(model=name, messages=[message], **GREEDY)
    assert chat.choices[0].message.content == expected
    response = api.responses.create(
        model=name, input=prompt, temperature=0, max_output_tokens=24, stream=False
    )
    assert response.output_text == expected


def test_a_temperature_samples_and_a_seed_repeats(api: Any, model: Path) -> None:
    first, again = (stream(api, model, PROMPTS[0], **SAMPLED) for _ in range(2))
    assert first == again != stream(api, model, PROMPTS[0], **GREEDY)
    assert stream(api, model, PROMPTS[0], **{**SAMPLED, "seed": 4}) != first


def test_the_example_prints_the_servers_answer(
    api: Any, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = runpy.run_path(str(EXAMPLES / "call.py"))["main"]
    call(str(model), PROMPTS[0], str(api.base_url))
    assert capsys.readouterr().out.strip() == plain(model, PROMPTS[0]).strip()
