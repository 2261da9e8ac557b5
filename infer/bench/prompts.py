"""Prompts of the speed measurements, from HumanEval, a file or a data set of the hub."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from conf import UserError
from conf.errors import Refusing
from conf.rows import read_rows
from infer.bench.problems import humaneval_file
from infer.chat import chat_ids
from infer.config import Infill
from infer.text import Text

HELD_OUT = "held_out.jsonl"  # of data_prep
FILES = (".jsonl", ".json", ".gz")  # no data set of the hub
MAX_ROWS = 10_000  # of a data set of the hub
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, and its name in its set."""

    id: str
    ids: tuple[int, ...]
    chat: bool = False  # made by the chat template


def name_of(source: str) -> str:
    """Return the name of a prompt set: a file's stem, or the last part of a hub name.

    The held-out documents of a data folder have the folder's name.
    """
    path = Path(source)
    if path.name == HELD_OUT:
        return path.resolve().parent.name
    name = path.name
    for suffix in reversed(FILES):
        name = name.removesuffix(suffix)
    return name


def read_prompts(
    source: str, text: Text, folder: Path, *, count: int, max_tokens: int, seed: int
) -> list[Prompt]:
    """Return `count` prompts of at most `max_tokens` tokens, drawn without replacement.

    `folder` is the model directory, whose chat template encodes messages. Raises UserError for
    a source that cannot be read, and for too few prompts.
    """
    rows = list(rows_of(source))
    random.Random(seed).shuffle(rows)
    prompts = []
    for index, row in enumerate(rows):
        ids = ids_of(row, text, folder, max_tokens=max_tokens)
        if 0 < len(ids) <= max_tokens:
            name = row.get("task_id") or row.get("id") or f"{name_of(source)}/{index}"
            prompts.append(Prompt(str(name), tuple(ids), "messages" in row))
        if len(prompts) == count:
            break
    else:
        raise UserError(
            f"count must be at most {len(prompts)} with prompts={source} of {max_tokens} tokens, got {count}."
        )
    return prompts


def rows_of(source: str) -> Iterable[Row]:
    """Return the rows of a source. Raises UserError for one that cannot be read."""
    if source == "humaneval":
        return read_rows(humaneval_file())
    problem = f"prompts={source} must be humaneval, a JSON-lines file, or a data set of the hub, got"
    with Refusing(problem):
        if Path(source).is_file() or source.endswith(FILES):
            return read_rows(Path(source))
        return _hub_rows(source)


def _hub_rows(name: str) -> list[Row]:
    from datasets import load_dataset

    splits: Any = load_dataset(name, streaming=True)
    split = "test" if "test" in splits else next(iter(splits))
    return list(islice(splits[split], MAX_ROWS))


def ids_of(row: Row, text: Text, folder: Path, *, max_tokens: int) -> Sequence[int]:
    """Return the token ids of a row's prompt; of a document, its first half, cut.

    Raises UserError for a row without a prompt.
    """
    if "messages" in row:
        return chat_ids(folder, messages_of(row))
    if "prompt" in row and "suffix" in row:
        return text.infill(Infill(row["prompt"], row["suffix"]))
    if "prompt" in row:
        return text.encode(row["prompt"])
    document = row.get("content") or row.get("text")
    if document is None:
        raise UserError(
            f"prompts must have prompt, messages or content in every row, got {row!r:.200}."
        )
    ids = text.encode(document)
    return ids[: min(max_tokens, max(1, len(ids) // 2))]


def messages_of(row: Row) -> tuple[dict[str, str], ...]:
    """Return the messages to answer of a row: without a last answer of its own.

    Raises UserError for a row without messages or prompt.
    """
    given = row.get("messages") or [{"role": "user", "content": row.get("prompt")}]
    with Refusing(f"prompts must have messages of role and content, got {row!r:.200}:"):
        messages = tuple(map(dict, given))
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or not messages[-1]["content"]:
            raise ValueError("no text to answer")
    return messages
