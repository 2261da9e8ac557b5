"""Prompts of the speed measurements, from HumanEval, a file or a data set of the hub.

Rows have the columns of the data sets that people measure with: docs/evaluation.md lists them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from conf.console import print_once
from conf.errors import UserError, as_user_error, in_one_line
from conf.settings.schema import any_of
from conf.text.conversations import (
    INSTRUCTION,
    LISTS,
    Message,
    as_messages,
    instruction,
    tools_of,
)
from conf.text.rows import DECOMPRESSORS, ROW_FILES, form_of, read_rows
from infer.bench.problems import humaneval_file, mbpp_prompt
from infer.chat import UnfitMessages, chat_ids, has_template
from infer.config import Infill
from infer.text import Text

HELD_OUT = "held_out.jsonl"  # of data_prep
MAX_ROWS = 10_000  # of a data set of the hub
# Columns that name a row, and those that hold a question.
NAMES = ("task_id", "question_id", "custom_id", "id", "name")
QUESTIONS = ("question", "query", "problem")
FORMS = (
    "messages or one of prompt, conversations, question, turns, instruction, document, "
    "translation and content in every row"
)
LANGUAGES = {
    "en": "English",
    "de": "German",
    "fr": "French",
    "cs": "Czech",
    "ru": "Russian",
    "zh": "Chinese",
    "fi": "Finnish",
    "ro": "Romanian",
    "tr": "Turkish",
    "hi": "Hindi",
    "es": "Spanish",
    "ja": "Japanese",
}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, its name in its set, and the row that it was made of."""

    id: str
    ids: tuple[int, ...]
    chat: bool = False  # made by the chat template
    max_new_tokens: int | None = None  # of its text; None: the decoder's
    row: Row = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class InfillingPrompts:
    """How infilling rows are drawn and encoded; None: as other rows, in the family's order."""

    share: float | None = None  # of a set, in place of a count
    max_new_tokens: int | None = None
    order: str | None = None


@dataclass(frozen=True)
class PublishedSet:
    """A prompt set by its name: where its published file is, and which of its rows it has."""

    title: str
    files: tuple[str, ...]  # in prompts_folder, the first that is there
    categories: frozenset[str] | None = None  # None for all rows

    def rows(self, source: str, folder: str | None, bad: list[str]) -> list[Row]:
        """Return the rows of the set. Raises UserError if there are none."""
        cure = f"Put {self.title}'s file there as {self.files[0]}"
        if folder is None:
            raise UserError(f"prompts={source} needs prompts_folder, got none. {cure}.")
        paths = [Path(folder) / name for name in self.files]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise UserError(
                f"prompts_folder={folder} must have {' or '.join(self.files)} for "
                f"prompts={source}, got neither. {cure}."
            )
        rows: list[Row] = list(read_rows(path, bad))
        if self.categories is not None:
            rows = [row for row in rows if row.get("category") in self.categories]
        if not rows:
            raise UserError(
                f"prompts={source} must have rows in {path}, got none of its "
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
    """Return the sources, with spec_bench as its six tasks, a set each."""
    expanded: list[str] = []
    for source in sources:
        tasks = [f"{SPEC_BENCH}:{task}" for task in SPEC_BENCH_TASKS]
        expanded += tasks if source == SPEC_BENCH else [source]
    return expanded


def name_of(source: str) -> str:
    """Return the name of a prompt set: a file's stem, or the last part of a hub name.

    The held-out documents of a data folder have the folder's name.
    """
    path = Path(source)
    if path.name == HELD_OUT:
        return path.resolve().parent.name
    name = path.name
    if form_of(name) in ROW_FILES:
        name = name.removesuffix(path.suffix if path.suffix in DECOMPRESSORS else "")
        return name.removesuffix(form_of(name))
    return name.replace(":", "-")


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

    `folder` is the model directory, whose chat template encodes messages, `published` that
    of the published files. Rows without a prompt are counted on standard error. With a
    `window` (length, end) a prompt is a document's tokens before place `end`, `length` of
    them (`last_tokens`), and other rows are left out. Raises UserError for a source that
    cannot be read, and for too few prompts.
    """
    bad: list[str] = []
    rows = rows_of(source, bad, published)
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
            names = filter(None, map(row.get, NAMES))
            name = next(names, f"{name_of(source)}/{index}")
            limit = infilling.max_new_tokens if is_infilling(row) else None
            prompts.append(Prompt(str(name), tuple(ids), chat, limit, row))
    report_bad(source, bad)
    if window and len(prompts) < count:
        raise UserError(
            f"count must be at most {len(prompts)} with prompts={source}, the documents of more than "
            f"{window[1]} tokens there, got {count}. Lower prompt_lengths, or give longer documents."
        )
    if len(prompts) < count:
        raise UserError(
            f"count must be at most {len(prompts)} with prompts={source} of {max_tokens} tokens, got {count}."
        )
    return prompts


def is_infilling(row: Row) -> bool:
    """Return True for a row with a text before and after a hole."""
    return all(isinstance(row.get(name), str) for name in ("prompt", "suffix"))


def report_bad(source: str, bad: Sequence[str]) -> None:
    """Count the rows that are left out on standard error."""
    if bad:
        print_once(
            f"prompts={source}: {len(bad)} rows are left out, first: {bad[0]}",
            error=True,
        )


def rows_of(
    source: str, bad: list[str] | None = None, published: str | None = None
) -> list[Row]:
    """Return the rows of a source; what is no row is appended to `bad` as a sentence.

    A source is humaneval, a name of PUBLISHED in the folder `published`, a file, or a data
    set of the hub as OWNER/NAME, or OWNER/NAME:CONFIG. Raises UserError for one that cannot
    be read.
    """
    bad = [] if bad is None else bad
    if known := PUBLISHED.get(source):
        return known.rows(source, published, bad)
    if source.startswith(f"{SPEC_BENCH}:"):
        raise UserError(
            f"prompts={source} must be a task of Spec-Bench, {any_of([*SPEC_BENCH_TASKS])}."
        )
    if source == "humaneval":
        return list(read_rows(humaneval_file()))
    problem = (
        f"prompts={source} must be humaneval, a JSON-lines file, a JSON list, CSV or "
        "parquet, or a data set of the hub, got"
    )
    with as_user_error(problem):
        if Path(source).is_dir():
            raise ValueError("a folder. Give a file of it")
        if Path(source).is_file() or form_of(source) in ROW_FILES:
            return list(read_rows(Path(source), bad))
        return _hub_rows(source)


def _hub_rows(name: str) -> list[Row]:
    from datasets import load_dataset

    name, _, config = name.partition(":")
    splits: Any = load_dataset(name, config or None, streaming=True)
    split = "test" if "test" in splits else next(iter(splits))
    return list(islice(splits[split], MAX_ROWS))


class NoPrompt(UserError):
    """A row without a prompt."""


@dataclass(frozen=True)
class Document:
    """A text whose first half is the prompt."""

    text: str


def prompt_of(row: Row) -> str | Infill | Document | list[Message]:
    """Return the prompt of a row: text to continue, a hole, a document, or messages.

    Raises NoPrompt for a row of no known form.
    """
    try:
        return _prompt_of(row)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoPrompt(
            f"prompts must have {FORMS}, got {row!r:.200}: {in_one_line(error)}"
        ) from error


def _prompt_of(row: Row) -> str | Infill | Document | list[Message]:
    """Return what prompt_of returns. Raises errors of other classes."""
    body = row.get("body")  # of an OpenAI batch
    for holder in (row, body if isinstance(body, Mapping) else {}):
        for name in LISTS:
            if holder.get(name) is not None:
                return _to_answer(as_messages(holder[name]), holder.get("system"))
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return _to_answer(as_messages(prompt))
    if is_infilling(row):
        return Infill(row["prompt"], row["suffix"])
    if row.get("test_list") is not None and row.get("entry_point") is None:
        return mbpp_prompt(row)
    if prompt:
        if not isinstance(prompt, str):
            raise ValueError("prompt must be text")
        return prompt
    if (question := _question(row)) is not None:
        return _to_answer([{"role": "user", "content": question}])
    text = row.get("content") or row.get("text")
    if not isinstance(text, str):
        raise ValueError("none of these columns")
    return Document(text)


def _question(row: Row) -> str | None:
    """Return the text of a row that asks something; None for another row."""
    if isinstance(turns := row.get("turns"), list) and turns:
        return str(turns[0])  # the others answer what the model has said
    for name in QUESTIONS:
        if isinstance(row.get(name), str):
            return str(row[name])
    if isinstance(row.get(INSTRUCTION), str):
        return instruction(row)
    if isinstance(document := row.get("document"), str):  # XSum
        return f"{document}\n\nSummarize this text in one sentence."
    if isinstance(pair := row.get("translation"), Mapping):  # WMT
        source, target = sorted(pair, key="en".__ne__)[:2]
        return (
            f"Translate from {LANGUAGES.get(source, source)} to "
            f"{LANGUAGES.get(target, target)}: {pair[source]}"
        )
    return None


def _to_answer(messages: list[Message], system: Any = None) -> list[Message]:
    """Return messages without a last answer. Raises ValueError if there is nothing to answer."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or not messages[-1]["content"]:
        raise ValueError("no text to answer")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def ids_of(row: Row, text: Text, folder: Path, *, max_tokens: int) -> Sequence[int]:
    """Return the token ids of a row's prompt, as `encode` does."""
    return encode(row, text, folder, max_tokens=max_tokens)[0]


def encode(
    row: Row, text: Text, folder: Path, *, max_tokens: int, order: str | None = None
) -> tuple[Sequence[int], bool]:
    """Return the token ids of a row's prompt, and whether the chat template made them.

    A document's prompt is its first half, cut. A question is text to continue for a
    model without a chat template. An infilling prompt may have an `order` that the family
    has not published. Raises NoPrompt for a row without a prompt.
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
        return text.encode(prompt[0]["content"]), False
    return chat_ids(folder, prompt, tools=tools_in(row)), True


def last_tokens(row: Row, text: Text, length: int, end: int) -> Sequence[int]:
    """Return the `length` token ids before place `end` of a document, what opens it among them.

    Prompts of several lengths before one place are continued by one text: they differ in
    what the model has read before it. Empty for a document that ends there or before.
    Raises NoPrompt for other rows than documents.
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
    """Return a prompt as OpenAI's API takes it: messages, or a prompt with or without suffix.

    A prompt that the chat template made has messages, with its tools.
    """
    if not prompt.chat:
        own = prompt_of(prompt.row)
        if isinstance(own, Infill):
            return {"prompt": own.prefix, "suffix": own.suffix}
        if isinstance(own, str):
            return {"prompt": own}
        return {"prompt": text.decode(prompt.ids)}  # a document, cut; a question
    tools = tools_in(prompt.row)
    messages = {"messages": list(messages_of(prompt.row))}
    return messages | ({"tools": tools} if tools else {})


def tools_in(row: Row) -> list[dict[str, Any]]:
    """Return the tools that a row declares. Raises NoPrompt."""
    body = row.get("body")
    try:
        return tools_of(body if isinstance(body, Mapping) else row)
    except ValueError as error:
        raise NoPrompt(f"prompts: {error}") from error


def messages_of(row: Row) -> tuple[Message, ...]:
    """Return the messages to answer of a row: without a last answer of its own.

    Raises NoPrompt for a row without a question.
    """
    prompt = prompt_of(row)
    if isinstance(prompt, Infill | Document):
        raise NoPrompt(
            f"prompts must have messages or a question to answer, got {row!r:.200}: a "
            "document or an infilling"
        )
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    return tuple(prompt)
