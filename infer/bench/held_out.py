"""Measure the loss of held-out documents: -log p of their tokens, in nats per token.

Only the first tokens of a document are read. The loss does not depend on a decoder: drafts
do not change a model's probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from conf.errors import UserError, as_user_error, counted
from conf.text.rows import read_rows
from infer.bench.harness import Record
from infer.bench.names import LOSS
from infer.prompts import DataRow, Document, NoPrompt, prompt_of
from infer.text import Text

HELD_OUT = "held_out"  # the name of the documents in the report
TOGETHER = 16  # the number of documents in a record
CURE = "Give the held_out.jsonl of data_prep, or other documents with content or text"


@dataclass(frozen=True)
class Documents:
    """Token ids of documents to measure the loss of."""

    who: str  # model or base
    ids: Sequence[Sequence[int]]


def read_documents(
    file: str, text: Text, *, count: int | None, most: int
) -> list[list[int]]:
    """Return the first `most` token ids of a file's first `count` documents; None: of all documents.

    Documents of a single token have no loss and are left out. Raises UserError for a file that
    cannot be read, for another row than a document, and for a file without a loss.
    """
    problem = f"quality.held_out={file} must be a file of documents, got"
    with as_user_error(problem, f". {CURE}"):
        rows = read_rows(Path(file))
    documents = [text.encode(body)[:most] for body in map(_body, rows[:count]) if body]
    documents = [ids for ids in documents if len(ids) > 1]
    if not documents:
        raise UserError(
            f"{problem} {counted(len(rows), 'row')} without a text of two tokens. {CURE}"
        )
    return documents


def _body(row: DataRow) -> str:
    """Return the text of a document; "" for an empty one. Raises UserError for another row."""
    if "" in (row.get("content"), row.get("text")):
        return ""
    try:
        document = prompt_of(row)
    except NoPrompt as error:
        raise UserError(f"quality.held_out: {error}") from error
    if not isinstance(document, Document):
        raise UserError(
            f"quality.held_out must have documents, got {row!r:.200}. {CURE}"
        )
    return document.text


def document_tasks(
    documents: Sequence[Sequence[int]], *, base: bool
) -> dict[str, Documents]:
    """Return the records to measure, by their names, for the model and perhaps its base."""
    return {
        f"{who}-{HELD_OUT}-{start:05}": Documents(
            who, documents[start : start + TOGETHER]
        )
        for who in ("model", "base")[: 1 + base]
        for start in range(0, len(documents), TOGETHER)
    }


@torch.inference_mode()
def losses(lm: PreTrainedModel, documents: Documents) -> Record:
    """Return the sum of the losses of the tokens after the first, and their number, for each document."""
    sums = []
    for ids in documents.ids:
        tokens = torch.tensor([ids], device=lm.device)
        logits = lm(tokens, use_cache=False).logits[0, :-1].float()
        sums.append(F.cross_entropy(logits, tokens[0, 1:], reduction="sum").item())
    counts = [len(ids) - 1 for ids in documents.ids]
    return {"who": documents.who, "losses": sums, "tokens": counts}


def loss_rows(records: Sequence[Record]) -> list[Record]:
    """Return a row of the report for the model, and one for the base if it was measured."""
    rows = []
    for who in dict.fromkeys(record["who"] for record in records):
        own = [record for record in records if record["who"] == who]
        tokens = sum(sum(record["tokens"]) for record in own)
        rows.append(
            {
                "benchmark": HELD_OUT,
                "who": who,
                "decoder": "plain",
                "temperature": 0.0,
                "metric": LOSS,
                "value": sum(sum(record["losses"]) for record in own) / tokens,
                "interval": None,
                "uncut": None,
                "unfit": 0,
                "problems": sum(len(record["tokens"]) for record in own),
                "tokens": tokens,
                "same": 0,
                "compared": 0,
            }
        )
    return rows
