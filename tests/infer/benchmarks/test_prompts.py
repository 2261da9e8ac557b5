import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from conf import UserError
from infer.benchmarks.config import PromptSetConfig
from infer.benchmarks.prompts import load_prompts
from infer.text import Text


@pytest.fixture
def text(data_folder: Path) -> Text:
    return Text(Tokenizer.from_file(str(data_folder / "tokenizer" / "tokenizer.json")))


def test_the_seed_alone_chooses(data_folder: Path, text: Text) -> None:
    config = PromptSetConfig(path=str(data_folder / "held_out.jsonl"), key="content", share=0.5, count=3)
    first = load_prompts("mine", config, text, seed=0)
    assert first == load_prompts("mine", config, text, seed=0) != load_prompts("mine", config, text, seed=1)
    contents = [json.loads(line)["content"] for line in (data_folder / "held_out.jsonl").open()]
    for prompt in first:
        assert any(whole.startswith(text.decode(prompt.ids)) for whole in contents)


def test_humaneval_comes_with_its_package(text: Text) -> None:
    prompts = load_prompts("humaneval", PromptSetConfig(count=164), text, seed=0)
    assert len(prompts) == 164 and all("def " in text.decode(prompt.ids) for prompt in prompts)


def test_wrong_prompt_files_are_named(tmp_path: Path, text: Text) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(UserError, match=r"prompts\.mine\.path=.*wanted a file"):
        load_prompts("mine", PromptSetConfig(path=str(path)), text, seed=0)
    path.write_text('{"prompt": "x"}\n{"prompt"\n')
    with pytest.raises(UserError, match="line 2: wanted JSON, found"):
        load_prompts("mine", PromptSetConfig(path=str(path)), text, seed=0)
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match="wanted 10 prompts, found 1 that fit"):
        load_prompts("mine", PromptSetConfig(path=str(path)), text, seed=0)
