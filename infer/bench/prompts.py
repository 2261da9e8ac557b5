"""Encode the prompts of measurements as token ids, from the rows of `infer.prompts`.

Published sets have names: their files are in `prompts_folder`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError, counted
from conf.settings.schema import any_of
from conf.text.conversations import LISTS
from conf.text.rows import ROW_FILES, form_of, read_rows, without_compression
from infer.bench.names import distinct
from infer.chat import UnfitMessages, chat_ids, has_template
from infer.config import Infill
from infer.prompts import (
    FORMS,
    DataRow,
    Document,
    NoPrompt,
    is_infilling,
    messages_of,
    prompt_of,
    report_bad,
    rows_of,
    tools_in,
)
from infer.text import Text

HELD_OUT = "held_out.jsonl"  # the held-out documents of data_prep
# Columns with the name of a row.
NAMES = ("task_id", "question_id", "custom_id", "id", "name")


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, its name in its prompt set, and its row."""

    id: str
    ids: tuple[int, ...]
    chat: bool = False  # encoded by the chat template
    max_new_tokens: int | None = None  # None: the decoder's
    row: DataRow = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class InfillingPrompts:
    """The settings of infilling prompts."""

    share: float | None = None  # share of the rows to draw; None: count rows
    max_new_tokens: int | None = None  # None: the decoder's
    order: str | None = None  # None: the order of the model's family


@dataclass(frozen=True)
class PublishedSet:
    """A published prompt set: its files, and the categories of its rows."""

    title: str
    files: tuple[
        str, ...
    ]  # paths below prompts_folder; the first existing file is read
    categories: frozenset[str] | None = None  # None: all rows

    def rows(self, source: str, folder: str | None, bad: list[str]) -> list[DataRow]:
        """Return the rows of the set. Raises UserError without any rows."""
        cure = f"Put {self.title}'s file there as {self.files[0]}"
        if folder is None:
            raise UserError(
                f"prompts={source} needs the setting prompts_folder. {cure}."
            )
        paths = [Path(folder) / name for name in self.files]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise UserError(
                f"prompts_folder={folder} must have {' or '.join(self.files)} for "
                f"prompts={source}. {cure}."
            )
        rows: list[DataRow] = list(read_rows(path, bad))
        if self.categories is not None:
            rows = [row for row in rows if row.get("category") in self.categories]
        if not rows:
            raise UserError(
                f"prompts={source} must have rows in {path}, got no row of its "
                f"categories. {cure}."
            )
        return rows


MT_BENCH = frozenset(
    [
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    ]
)
SPEC_BENCH = "spec_bench"
SPEC_BENCH_FILES = ("spec_bench/question.jsonl", "question.jsonl")
SPEC_BENCH_TASKS = {
    "mt_bench": MT_BENCH,
    **{
        name: frozenset([name])
        for name in ("translation", "summarization", "qa", "math_reasoning", "rag")
    },
}
PUBLISHED = {
    "mt_bench": PublishedSet(
        "MT-Bench",
        ("mt_bench/question.jsonl", "question.jsonl", "spec_bench/question.jsonl"),
        MT_BENCH,
    ),
    "gsm8k": PublishedSet("GSM8K", ("gsm8k/test.jsonl", "test.jsonl")),
    **{
        f"{SPEC_BENCH}:{task}": PublishedSet("Spec-Bench", SPEC_BENCH_FILES, categories)
        for task, categories in SPEC_BENCH_TASKS.items()
    },
}


def expand_names(sources: Sequence[str]) -> list[str]:
    """Return the sources, with spec_bench replaced by its six tasks, each a prompt set."""
    expanded: list[str] = []
    for source in sources:
        tasks = [f"{SPEC_BENCH}:{task}" for task in SPEC_BENCH_TASKS]
        expanded += tasks if source == SPEC_BENCH else [source]
    return expanded


def name_of(source: str) -> str:
    """Return the name of a prompt set: a file's stem, or the last part of a hub name.

    The held-out documents of a data folder get the name of the folder.
    """
    path = Path(source)
    if path.name == HELD_OUT:
        return path.resolve().parent.name
    if form_of(path.name) in ROW_FILES:
        return without_compression(path).stem
    return path.name.replace(":", "-")


def read_prompts(
    source: str,
    text: Text,
    folder: Path,
    *,
    count: int,
    max_tokens: int,
    seed: int,
    published: str | None = None,
    infilling: InfillingPrompts = InfillingPrompts(),
    window: tuple[int, int] | None = None,
) -> list[Prompt]:
    """Return `count` prompts of at most `max_tokens` tokens, drawn without replacement.

    Rows that share a name get distinct ones, because results find a prompt by its name.
    `folder` is the model directory; its chat template encodes messages. `published` is the
    folder of the published files. Rows without a prompt are counted on standard error. With a
    `window` (length, end) a prompt is the `length` tokens of a document before place `end`
    (`last_tokens`), and rows without a document are left out. Raises UserError for a source
    that cannot be read, and for too few prompts.
    """
    bad: list[str] = []
    rows = set_rows(source, bad, published)
    unread = len(bad)
    holes = [row for row in rows if is_infilling(row)]
    if infilling.share is not None and holes:
        count = max(1, round(infilling.share * len(holes)))
    random.Random(seed).shuffle(rows)
    prompts: list[Prompt] = []
    for index, row in enumerate(rows):
        if len(prompts) == count:
            break
        try:
            if window:
                ids, chat = last_tokens(row, text, *window), False
            else:
                ids, chat = encode(
                    row, text, folder, max_tokens=max_tokens, order=infilling.order
                )
        except (NoPrompt, UnfitMessages) as error:
            bad.append(str(error))
            continue
        if 0 < len(ids) <= max_tokens:
            own = (row[name] for name in NAMES if row.get(name) not in (None, ""))
            name = next(own, f"{name_of(source)}/{index}")
            limit = infilling.max_new_tokens if is_infilling(row) else None
            prompts.append(Prompt(str(name), tuple(ids), chat, limit, row))
    report_bad(source, bad)
    if window and len(prompts) < count:
        raise UserError(
            f"count must be at most {len(prompts)}, the number of documents in prompts={source} with more "
            f"than {window[1]} tokens, got {count}. Lower prompt_lengths, or give longer documents."
        )
    if len(bad) - unread == len(rows):
        raise UserError(
            f"prompts={source} must have a row with a prompt, got {counted(len(rows), 'row')}. "
            f"Give a file of rows with {FORMS}."
        )
    if len(prompts) < count:
        by_share = infilling.share is not None and holes
        setting = "infilling_share" if by_share else "count"
        cure = f"Lower {setting}, or raise" if prompts else "Raise"
        got = f"{infilling.share}, which is {count}" if by_share else str(count)
        raise UserError(
            f"{setting} must be at most {len(prompts)}{' prompts' if by_share else ''}, the number of prompts "
            f"in prompts={source} with at most {max_tokens} tokens, got {got}. {cure} prompt_tokens."
        )
    names = distinct([prompt.id for prompt in prompts])
    return [replace(prompt, id=name) for prompt, name in zip(prompts, names)]


def set_rows(
    source: str, bad: list[str] | None = None, published: str | None = None
) -> list[DataRow]:
    """Return the rows of a prompt set, as `rows_of` does.

    A source may also be a name of PUBLISHED, with its file in the folder `published`.
    """
    bad = [] if bad is None else bad
    if known := PUBLISHED.get(source):
        return known.rows(source, published, bad)
    if source.startswith(f"{SPEC_BENCH}:"):
        raise UserError(
            f"prompts={source} must be a task of Spec-Bench, {any_of([*SPEC_BENCH_TASKS])}, "
            f"got {source.removeprefix(SPEC_BENCH + ':')}. Use {SPEC_BENCH} for all tasks."
        )
    return rows_of(source, bad)


def ids_of(row: DataRow, text: Text, folder: Path, *, max_tokens: int) -> Sequence[int]:
    """Return the token ids of a row's prompt, as `encode` does."""
    return encode(row, text, folder, max_tokens=max_tokens)[0]


def encode(
    row: DataRow, text: Text, folder: Path, *, max_tokens: int, order: str | None = None
) -> tuple[Sequence[int], bool]:
    """Return the token ids of a row's prompt, and whether the chat template encoded it.

    The prompt of a document is its first half, cut to `max_tokens`. For a model without a chat
    template a question is text to continue. An infilling prompt may have an `order` that the
    model's family has not published. Raises NoPrompt for a row without a prompt.
    """
    prompt = prompt_of(row)
    if isinstance(prompt, Infill):
        hole = replace(prompt, order=order)
        return text.infill(hole, published=not order), False
    if isinstance(prompt, Document):
        ids = text.encode(prompt.text)
        return ids[: min(max_tokens, max(1, len(ids) // 2))], False
    if isinstance(prompt, str):
        return text.encode(prompt), False
    question = not any(row.get(name) for name in (*LISTS, "body", "prompt"))
    if question and not has_template(folder):
        return text.encode(prompt[-1]["content"]), False
    return chat_ids(folder, prompt, tools=tools_in(row)), True


def last_tokens(row: DataRow, text: Text, length: int, end: int) -> Sequence[int]:
    """Return `length` token ids: the first ids of every text, such as BOS, and a document's ids up to `end`.

    Prompts of different lengths that end at the same place have the same continuation, so
    they differ only in the length of the context. The result is empty for a document of at most
    `end` tokens. Raises NoPrompt for a row without a document.
    """
    prompt = prompt_of(row)
    if not isinstance(prompt, Document):
        raise NoPrompt(
            f"prompts must be documents (content or text) with prompt_lengths, got {row!r:.200}"
        )
    ids, opening = text.encode(prompt.text), text.encode("")
    if len(ids) <= end:
        return ()
    return [*opening, *ids[end - length + len(opening) : end]]


def request_of(prompt: Prompt, text: Text) -> dict[str, Any]:
    """Return the arguments of a request to OpenAI's API for a prompt.

    They are messages and tools for a prompt that was encoded by the chat template, otherwise
    prompt, and for infilling also suffix.
    """
    if not prompt.chat:
        own = prompt_of(prompt.row)
        if isinstance(own, Infill):
            return {"prompt": own.prefix, "suffix": own.suffix}
        if isinstance(own, str):
            return {"prompt": own}
        return {"prompt": text.decode(prompt.ids)}  # part of a document, or a question
    tools = tools_in(prompt.row)
    messages = {"messages": list(messages_of(prompt.row))}
    return messages | ({"tools": tools} if tools else {})
