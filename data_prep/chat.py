"""Conversations to ids by the tokenizer's chat template, exactly as decoding sees them.

For each answer the template is rendered twice: up to the answer's start, which is the
prompt, and with the answer. What the second adds is encoded apart from the prompt, as a
model generates it: the answer, its end of turn, what follows.
"""

from dataclasses import replace
from pathlib import Path

from conf.errors import in_one_line
from conf.text import chat
from data_prep.document import Document, Drop, Turn
from data_prep.encode import Encoder

PROBLEM = "tokenizer must have a chat template for data.messages, got"


class ChatTemplate:
    """The chat template in a tokenizer's folder. Raises UserError where there is none."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self._template = chat.ChatTemplate(folder, encoder, PROBLEM)
        self._control = encoder.control

    def encode(self, row: Document | Drop) -> Document | Drop:
        """Return a conversation with its turns, or a Drop.

        Dropped are those that the template refuses or renders otherwise once an answer
        follows, and those whose answers all have weight 0.
        """
        if isinstance(row, Drop) or not row.messages:
            return row
        answers = [
            index
            for index, message in enumerate(row.messages)
            if index and message["role"] == "assistant" and "weight" not in message
        ]
        if not answers:
            return row.drop("no answer to train on", "weight 0")
        try:
            conversation = self._template.prepare(row.messages, row.tools)
            turns = []
            for index in answers:
                last = index == len(row.messages) - 1
                prompt, answer = self._template.answer_ids(
                    conversation, index, ends=row.ends or not last
                )
                turns.append(Turn(index, len(prompt), prompt + answer))
        except chat.REFUSALS as error:
            return row.drop("chat template", in_one_line(error, 200))
        return replace(row, turns=tuple(turns))
