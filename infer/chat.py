"""Messages to token ids by the chat template of a model directory."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from conf.errors import UserError, as_user_error, in_one_line
from conf.text.chat import REFUSALS, ChatTemplate, load_tokenizer
from infer.models.checkpoint import ModelDirectory

PROBLEM = "model={} must have a chat template for messages, got"


class UnfitMessages(UserError):
    """Messages that the chat template refuses."""


@cache
def has_template(folder: Path) -> bool:
    """Return True if a model directory has a chat template."""
    return bool(load_tokenizer(folder, PROBLEM.format(folder)).chat_template)


def chat_ids(
    folder: Path,
    messages: Sequence[Mapping[str, Any]],
    answer: str = "",
    tools: Sequence[Any] = (),
) -> list[int]:
    """Return the ids of messages by the model's chat template, up to the answer's start.

    A control piece that a message spells is text. `answer` is a beginning of the answer.
    Raises UnfitMessages if the template refuses them.
    """
    template = _template(folder)
    try:
        return template.prompt_ids(messages, tools, answer)
    except REFUSALS as error:
        raise UnfitMessages(
            f"messages must be such as the chat template of model={folder} renders, got "
            f"{messages!r:.200}: {in_one_line(error)}"
        ) from error


def user_header(folder: Path) -> list[int]:
    """Return the ids by which the chat template opens the user's first turn."""
    with as_user_error(PROBLEM.format(folder)):
        return _template(folder).user_header()


@cache
def _template(folder: Path) -> ChatTemplate:
    encoder = ModelDirectory(folder).text.encoder
    return ChatTemplate(folder, encoder, PROBLEM.format(folder))
