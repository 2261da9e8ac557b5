"""Encode messages by the chat template of a model directory."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from conf.errors import UserError, as_user_error, in_one_line
from conf.text.chat import REFUSALS, ChatTemplate, load_tokenizer
from infer.models.checkpoint import ModelDirectory

PROBLEM = "model={} must have a chat template for messages, got"


class UnfitMessages(UserError):
    """The chat template does not accept the messages."""


@cache
def has_template(folder: Path) -> bool:
    """Return True if a model directory has a chat template."""
    return bool(load_tokenizer(folder, PROBLEM.format(folder)).chat_template)


def check_template(folder: Path) -> None:
    """Raise UserError if a model directory has no chat template."""
    _template(folder)


def chat_ids(
    folder: Path,
    messages: Sequence[Mapping[str, Any]],
    answer: str = "",
    tools: Sequence[Any] = (),
) -> list[int]:
    """Return the token ids of messages by the model's chat template, up to the answer's start.

    Control pieces in a message are encoded as text. `answer` is the beginning of the answer.
    Raises UnfitMessages if the template refuses the messages.
    """
    template = _template(folder)
    try:
        return template.prompt_ids(messages, tools, answer)
    except REFUSALS as error:
        raise UnfitMessages(
            f"messages must fit the chat template of model={folder}, got "
            f"{messages!r:.200}: {in_one_line(error)}"
        ) from error


def user_header(folder: Path) -> list[int]:
    """Return the ids that the chat template puts before the user's first message."""
    with as_user_error(PROBLEM.format(folder)):
        return _template(folder).user_header()


@cache
def _template(folder: Path) -> ChatTemplate:
    encoder = ModelDirectory(folder).text.encoder
    return ChatTemplate(folder, encoder, PROBLEM.format(folder))
