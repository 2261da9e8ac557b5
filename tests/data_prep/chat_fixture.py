"""A tokenizer of single bytes with chat pieces, and conversations for it."""

from pathlib import Path
from typing import Any

from conf.settings.compose import settings
from data_prep.config import DataPrepConfig
from tests import bpe
from tests.conftest import write_rows

ADAPTIVE = [f"<adaptive_{index}>" for index in range(1, 8)]
# SmolLM2's template, which adds a default system message.
CHATML = """{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Llama 2's template, which strips contents and adds a space before an answer.
INST = """{{ bos_token }}{% for message in messages %}\
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}\
{% if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}\
{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
# This template renders only the last message.
FORGETFUL = "{{ messages[-1].role }}: {{ messages[-1].content }}"
# This template renders the prompt differently once an answer follows.
COUNTING = "{{ messages | length }}{% for m in messages %} {{ m.role }}: {{ m.content }}{% endfor %}"
TEMPLATES = {
    "chatml": CHATML,
    "inst": INST,
    "forgetful": FORGETFUL,
    "counting": COUNTING,
}


def say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Return alternating messages of user and assistant."""
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": roles[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]


def chat_tokenizer(folder: Path, template: str | None) -> Path:
    """Write the tokenizer and, as a separate file, its template."""
    tokenizer = bpe.train_bpe(ADAPTIVE, [], 300)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bpe.save(tokenizer, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def chat_settings(folder: Path, rows: list[Any], *overrides: str) -> DataPrepConfig:
    """Write rows to three files in `folder`; return settings to prepare them."""
    source = folder / "in"
    source.mkdir(exist_ok=True)
    for index in range(3):
        write_rows(source / f"{index}.jsonl", rows[index::3])
    if not (folder / "tokenizer").is_dir():
        chat_tokenizer(folder / "tokenizer", CHATML)
    arguments = [
        *("data=chat", bpe.ADAPTIVE, "seq_len=256", "held_out=0", "workers=1"),
        *("max_unreadable=1", "ngrams.megabytes=0", "benchmarks=[]"),
        *(f"data.path={source}", f"tokenizer={folder}/tokenizer", f"out={folder}/out"),
    ]
    return settings("data_prep", DataPrepConfig, [*arguments, *overrides])
