"""Read the prompts of measurements from HumanEval, a file or a data set of the hub.

The supported columns of the rows are listed in docs/evaluation.md.
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
from infer.bench.problems import DataRow, humaneval_file, mbpp_prompt
from infer.chat import UnfitMessages, chat_ids, has_template
from infer.config import Infill
from infer.text import Text

HELD_OUT = "held_out.jsonl"  # the held-out documents of data_prep
MAX_ROWS = 10_000  # rows that are read of a data set of the hub
# Columns with the name of a row, and columns with a question.
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

    `folder` is the model directory; its chat template encodes messages. `published` is the
    folder of the published files. Rows without a prompt are counted on standard error. With a
    `window` (length, end) a prompt is the `length` tokens of a document before place `end`
    (`last_tokens`), and rows without a document are left out. Raises UserError for a source
    that cannot be read, and for too few prompts.
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
            f"count must be at most {len(prompts)}, the number of documents in prompts={source} with more "
            f"than {window[1]} tokens, got {count}. Lower prompt_lengths, or give longer documents."
        )
    if len(prompts) < count:
        raise UserError(
            f"count must be at most {len(prompts)}, the number of prompts in prompts={source} with at most "
            f"{max_tokens} tokens, got {count}. Lower count, or raise prompt_tokens."
        )
    return prompts


def is_infilling(row: DataRow) -> bool:
    """Return True for a row with a prefix and a suffix."""
    return all(isinstance(row.get(name), str) for name in ("prompt", "suffix"))


def report_bad(source: str, bad: Sequence[str]) -> None:
    """Print the number of rows without a prompt, and the first reason, to standard error."""
    if bad:
        print_once(
            f"prompts={source}: {len(bad)} rows are left out, first: {bad[0]}",
            error=True,
        )


def rows_of(
    source: str, bad: list[str] | None = None, published: str | None = None
) -> list[DataRow]:
    """Return the rows of a source. For each malformed row, append a sentence to `bad`.

    A source is humaneval, a name of PUBLISHED with its file in the folder `published`, a file,
    or a data set of the hub as OWNER/NAME or OWNER/NAME:CONFIG. Raises UserError for a source
    that cannot be read.
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
            raise ValueError("a folder. Give a file in it")
        if Path(source).is_file() or form_of(source) in ROW_FILES:
            return list(read_rows(Path(source), bad))
        return _hub_rows(source)


def _hub_rows(name: str) -> list[DataRow]:
    from datasets import load_dataset

    name, _, config = name.partition(":")
    splits: Any = load_dataset(name, config or None, streaming=True)
    split = "test" if "test" in splits else next(iter(splits))
    return list(islice(splits[split], MAX_ROWS))


class NoPrompt(UserError):
    """The row has no prompt."""


@dataclass(frozen=True)
class Document:
    """A text; its first half is the prompt."""

    text: str


def prompt_of(row: DataRow) -> str | Infill | Document | list[Message]:
    """Return the prompt of a row: text to continue, an infilling, a document, or messages.

    Raises NoPrompt for a row of an unknown form.
    """
    try:
        return _prompt_of(row)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoPrompt(
            f"prompts must have {FORMS}, got {row!r:.200}: {in_one_line(error)}"
        ) from error


def _prompt_of(row: DataRow) -> str | Infill | Document | list[Message]:
    """Return the prompt of a row as `prompt_of` does. Raises other errors than NoPrompt."""
    body = row.get("body")  # a request in a file for OpenAI's batch API
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
        raise ValueError("a row without these columns")
    return Document(text)


def _question(row: DataRow) -> str | None:
    """Return the question of a row; None for a row without a question."""
    if isinstance(turns := row.get("turns"), list) and turns:
        return str(turns[0])  # later turns refer to the model's answers
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
    """Return messages without answers at their end. Raises ValueError without a question."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or not messages[-1]["content"]:
        raise ValueError("no text to answer")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


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
        return text.encode(prompt[0]["content"]), False
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


def tools_in(row: DataRow) -> list[dict[str, Any]]:
    """Return the tools that a row declares. Raises NoPrompt for malformed tools."""
    body = row.get("body")
    try:
        return tools_of(body if isinstance(body, Mapping) else row)
    except ValueError as error:
        raise NoPrompt(f"prompts: {error}") from error


def messages_of(row: DataRow) -> tuple[Message, ...]:
    """Return the messages of a row, without answers at their end.

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
