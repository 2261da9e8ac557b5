"""Conversations to ids by the tokenizer's chat template, exactly as decoding sees them.

For each answer the template is rendered twice by Transformers: up to the answer's start,
which is the prompt, and with the answer. What the second adds is encoded apart from the
prompt, as a model generates it: the answer, its end of turn, what follows.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from conf import UserError
from conf.errors import TOKENIZING, Refusing, in_one_line
from data_prep.document import Document, Drop, Message, Turn
from data_prep.encode import Encoder


class ChatTemplate:
    """The chat template in a tokenizer's folder. Raises UserError where there is none."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        # Imported late: it takes seconds, and other data do not need it.
        from transformers import AutoTokenizer

        with Refusing(
            "tokenizer must be one that Transformers reads, got",
            ". Use a tokenizer of one of Transformers' own classes",
        ):
            self._library: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if not self._library.chat_template:
            raise UserError(
                "tokenizer must have a chat template for data.messages, got no "
                "chat_template.jinja and no chat_template in tokenizer_config.json"
            )
        self._spells_control = encoder.spells_control
        # No implicit space; unlike the encoder's own, a copy knows special pieces.
        self._tokenizer = Tokenizer.from_str(encoder.tokenizer.to_str())
        pieces = self._tokenizer.get_added_tokens_decoder().values()
        self._special = [piece.content for piece in pieces if piece.special]

    @TOKENIZING
    def encode(self, row: Document | Drop) -> Document | Drop:
        """Return a conversation with its turns, or a Drop.

        Dropped are those in which a message spells a control piece, since only the
        template may write it, and those that the template refuses or renders otherwise
        once an answer follows.
        """
        if isinstance(row, Drop) or not row.messages:
            return row
        spelled = any(piece in row.text for piece in self._special)
        if spelled or self._spells_control(row.text):
            return row.drop("control piece")
        try:
            turns = [
                self._turn(row, index)
                for index, message in enumerate(row.messages)
                if index and message["role"] == "assistant"
            ]
        except (TemplateError, TypeError, ValueError) as error:
            return row.drop("chat template", in_one_line(error, 200))
        return replace(row, turns=tuple(turns))

    def _turn(self, document: Document, index: int) -> Turn:
        """Return the ids of a message and of those before it. Raises ValueError."""
        prompt = self._render(document.messages[:index], add_generation_prompt=True)
        whole = self._render(document.messages[: index + 1])
        answer = whole.removeprefix(prompt)
        if answer == whole:
            raise ValueError("the conversation does not begin with the prompt")
        if not document.ends and index == len(document.messages) - 1:
            content = document.messages[index]["content"].strip()
            answer = answer[: answer.index(content) + len(content)]
        ids = self._library(prompt, add_special_tokens=False, verbose=False).input_ids
        answer_ids = self._tokenizer.encode(answer, add_special_tokens=False).ids
        return Turn(index, len(ids), ids + answer_ids)

    def _render(self, messages: Sequence[Message], **options: bool) -> str:
        rendered: str = self._library.apply_chat_template(
            list(messages), tokenize=False, **options
        )
        return rendered
