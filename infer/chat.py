"""Messages to token ids by the chat template of a model directory."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from conf.errors import Refusing


def has_template(folder: Path) -> bool:
    """Return True if a model directory has a chat template."""
    return bool(_tokenizer(folder).chat_template)


def chat_ids(
    folder: Path, messages: Sequence[Mapping[str, str]], answer: str = ""
) -> list[int]:
    """Return the ids of messages by the model's chat template, up to the answer's start.

    `answer` is a beginning of the answer, without white space at its end.
    """
    turns = [dict(message) for message in messages]
    if answer:
        turns.append({"role": "assistant", "content": answer})
    with Refusing(f"model={folder} must have a chat template for messages, got"):
        encoded = _tokenizer(folder).apply_chat_template(
            turns,
            add_generation_prompt=not answer,
            continue_final_message=bool(answer),
            tokenize=True,
            return_dict=True,
        )
    return encoded["input_ids"]


def user_header(folder: Path) -> list[int]:
    """Return the ids by which the chat template opens the user's first turn."""
    mark = "\ue000"  # a character that no template has
    messages = [{"role": "user", "content": mark}]
    tokenizer = _tokenizer(folder)
    with Refusing(f"model={folder} must have a chat template for messages, got"):
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    header = text.partition(mark)[0]
    ids: list[int] = tokenizer(header, add_special_tokens=False).input_ids
    return ids


@cache
def _tokenizer(folder: Path) -> Any:
    with Refusing(
        f"model={folder} must have a tokenizer for messages, got",
        ". Use a model whose tokenizer is one of Transformers' own classes",
    ):
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
