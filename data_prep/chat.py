"""Encode conversations by the tokenizer's chat template, exactly as decoding does.

For each answer the template is rendered twice: up to the start of the answer (the prompt),
and with the answer. The additional text of the second rendering (the answer, its end of turn
and all that follows) is encoded separately from the prompt, as a model generates it.
"""

from dataclasses import replace
from pathlib import Path

from conf.errors import in_one_line
from conf.text import chat
from conf.text.conversations import text_of
from data_prep.document import Document, Drop, Turn
from data_prep.encode import Encoder

PROBLEM = "tokenizer must have a chat template for data.messages, got"


class ChatTemplate:
    """The chat template of a tokenizer's folder. Raises UserError if there is no template."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self._template = chat.ChatTemplate(folder, encoder, PROBLEM)
        self._encoder = encoder

    def encode(self, row: Document | Drop) -> Document | Drop:
        """Return a conversation with its encoded turns, or a Drop.

        A conversation is dropped if the template refuses it, if the template renders a prompt
        differently once the answer follows or writes a piece without an embedding row, or if
        all its answers are blank or have weight 0.
        """
        if isinstance(row, Drop) or not row.messages:
            return row
        weighted = [
            index
            for index, message in enumerate(row.messages)
            if index and message["role"] == "assistant" and "weight" not in message
        ]
        if not weighted:
            return row.drop("no answer to train on", "weight 0")
        # A model would learn from a blank answer only to end its turn at once.
        answers = [i for i in weighted if text_of([row.messages[i]]).strip()]
        if not answers:
            return row.drop("empty answer")
        try:
            conversation = self._template.prepare(row.messages, row.tools)
            turns = []
            for index in answers:
                last = index == len(row.messages) - 1
                prompt, answer = self._template.answer_ids(
                    conversation, index, ends=row.ends or not last
                )
                ids = prompt + answer
                if (piece := self._without_row(ids)) is not None:
                    detail = (
                        f"the model has no embedding row of {piece}: resize the model"
                    )
                    return row.drop("chat template", detail)
                turns.append(Turn(index, len(prompt), ids))
        except chat.REFUSALS as error:
            return row.drop("chat template", in_one_line(error, 200))
        return replace(row, turns=tuple(turns))

    def _without_row(self, ids: list[int]) -> str | None:
        """Return the first piece among `ids` beyond the rows of the model, or of an adaptive id."""
        vocab = self._encoder.vocab
        wrong = (id for id in ids if id >= vocab.size or id in vocab.adaptive)
        id = next(wrong, None)
        return (
            None if id is None else f"{self._encoder.tokenizer.id_to_token(id)} ({id})"
        )
