"""Convert conversations from the published formats to one list of messages with role and content.

    OpenAI      messages: a list of {role, content}
    ShareGPT    conversations: a list of {from, value}, and system
    Alpaca      instruction, input, output, and history
    pairs       prompt and completion (texts, or lists of messages), question and answer, ...

A list of messages may also be one object of lists, {role: [...], content: [...]}, as `datasets` stores it.

A message has role, content, and optionally tool_calls, tool_call_id, name, the model's reasoning, and weight.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from conf.text.rows import without_null

Message = dict[str, Any]
ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
LISTS = ("messages", "conversations", "conversation")
INSTRUCTION = "instruction"
INPUTS = ("input", "context")  # Alpaca's, Dolly's
OUTPUTS = ("output", "response")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
)
# Columns with a text that the inputs complete.
WITH_INPUTS = (INSTRUCTION, "question", "query")
# Every column that may contain a conversation or a part of it.
COLUMNS = tuple(
    dict.fromkeys([*LISTS, INSTRUCTION, *INPUTS, *OUTPUTS, *sum(PAIRS, ())])
)
SYSTEM = ("system", "system_prompt")
HISTORY = "history"  # earlier turns, of Alpaca in LLaMA-Factory
CONTEXT_COLUMNS = (*SYSTEM, HISTORY, "tools", "functions")  # in addition to COLUMNS
FORMS = "messages, conversations, instruction with output, or prompt with completion"
REASONING = ("reasoning_content", "reasoning", "thinking")
# Optional text fields of a message that are copied.
OPTIONAL_KEYS = ("tool_call_id", "name", *REASONING)


class NoConversation(ValueError):
    """The row lacks the columns of every known conversation format."""


def conversation(row: Mapping[str, Any], column: str = "messages") -> list[Message]:
    """Return the messages of a row, from `column` or, by default, from any known format.

    Raises NoConversation for a row in an unknown format, ValueError for a malformed conversation.
    """
    lists = LISTS if column == "messages" else (column,)
    name = next((name for name in lists if row.get(name) is not None), None)
    if name:
        messages = as_messages(row[name])
    elif column != "messages":
        raise NoConversation(f"no {column}, got {', '.join(map(str, row))}")
    else:
        messages = [*earlier_turns(row), *_pair(row)]
    return with_system(messages, row)


def with_system(messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
    """Return messages after the text of a row's column `system`, unless they begin with their own."""
    first = messages[0]["role"] if messages else "system"
    system = next((row[name] for name in SYSTEM if row.get(name)), None)
    if isinstance(system, str) and first not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    return messages


def earlier_turns(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of the column `history`. Raises ValueError unless it has pairs of texts."""
    pairs = row.get(HISTORY) or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError(
            f"history must be a list of pairs [question, answer], got {pairs!r:.50}"
        )
    return [
        {"role": role, "content": _text(text, HISTORY)}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair)
    ]


def _pair(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of an Alpaca row, or of a pair of question and answer."""
    answers = (name for name in OUTPUTS if row.get(name) is not None)
    if row.get(INSTRUCTION) is not None and (answer := next(answers, None)):
        return _side(row, INSTRUCTION, "user") + _side(row, answer, "assistant")
    for prompt, answer in PAIRS:
        if row.get(prompt) is not None and row.get(answer) is not None:
            return _side(row, prompt, "user") + _side(row, answer, "assistant")
    raise NoConversation(f"no {FORMS}, got {', '.join(map(str, row))}")


def _side(row: Mapping[str, Any], name: str, role: str) -> list[Message]:
    value = row[name]
    if isinstance(value, list):
        return as_messages(value)
    text = question(row, name) if name in WITH_INPUTS else _text(value, name)
    return [{"role": role, "content": text}]


def question(row: Mapping[str, Any], column: str) -> str:
    """Return an instruction or a question and the row's inputs, joined by blank lines."""
    instances = row.get("instances")  # of Alpaca's seed tasks
    first = instances[0] if isinstance(instances, list) and instances else row
    if not isinstance(first, Mapping):
        raise ValueError(f"instances must be objects, got {type(first).__name__}")
    texts = {column: row[column], **{name: first.get(name) for name in INPUTS}}
    return "\n\n".join(_text(text, name) for name, text in texts.items() if text)


def as_messages(value: Any) -> list[Message]:
    """Return messages in OpenAI's or ShareGPT's format as messages.

    Raises ValueError for any other value.
    """
    if isinstance(value, str | bytes):  # a cell of CSV
        value = _parsed(value)
    if isinstance(value, Mapping):
        value = _transposed(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"must be a list of messages, got {type(value).__name__}")
    return [_message(message) for message in value]


def _transposed(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of an object of lists. Raises ValueError unless its lists have one length."""
    lists = {name: value for name, value in columns.items() if value is not None}
    if not all(isinstance(value, list) for value in lists.values()):
        raise ValueError("must be a list of messages, got an object")
    if len({len(value) for value in lists.values()}) > 1:
        raise ValueError("an object of lists must have lists of the same length")
    return [dict(zip(lists, values)) for values in zip(*lists.values())]


def _parsed(cell: str | bytes) -> Any:
    text = cell.decode() if isinstance(cell, bytes) else cell
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)  # as pandas writes a list into CSV
    except (SyntaxError, ValueError, MemoryError) as error:
        raise ValueError("must be a list of messages, got a text") from error


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError(f"a message must be an object, got {type(value).__name__}")
    given = value.get("role") or value.get("from")
    if not isinstance(given, str) or given.lower() not in ROLES:
        roles = "system, developer, user, assistant, tool"
        raise ValueError(f"a role must be one of {roles}, got {given!r:.50}")
    message: Message = {"role": ROLES[given.lower()]}
    content = _content(value.get("content", value.get("value")))
    calls = _calls(value)
    if given == "function_call":
        calls, content = [_call(_parsed(content or ""))], None
    if content is None and message["role"] != "assistant":
        raise ValueError(f"the content of {given} must be text, got null")
    message["content"] = content or ""
    if calls:
        message["tool_calls"] = calls
    message |= {
        name: value[name] for name in OPTIONAL_KEYS if isinstance(value.get(name), str)
    }
    if value.get("weight") == 0 or value.get("train") is False:  # Mistral's, Axolotl's
        message["weight"] = 0
    return message


def _content(value: Any) -> str | None:
    """Return the text of a message's content, which is a text or a list of parts."""
    if isinstance(value, list):
        parts = [_part(part) for part in value]
        return "".join(parts)
    return None if value is None else _text(value, "content")


def _part(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = value.get("text") if isinstance(value, Mapping) else None
    if not isinstance(text, str):
        kind = value.get("type") if isinstance(value, Mapping) else value
        raise ValueError(f"a part of content must be text, got {kind!r:.50}")
    return text


def _calls(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message, with arguments as objects, as chat templates expect."""
    calls = value.get("tool_calls") or []
    if function := value.get("function_call"):  # OpenAI's predecessor of tool_calls
        calls = [*calls, function]
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, got {type(calls).__name__}")
    return list(map(_call, calls))


def _call(value: Any) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call must have a function's name, got {value!r:.50}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(
                f"a tool call's arguments must be JSON: {error}"
            ) from error
    call: dict[str, Any] = {"type": "function"}
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    call["function"] = {"name": function["name"], "arguments": arguments or {}}
    return call


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools that a row declares, as chat templates expect them.

    Raises ValueError for malformed tools.
    """
    value = row.get("tools") or row.get("functions") or []
    if isinstance(value, str | bytes):
        value = _parsed(value) if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(t, Mapping) for t in value):
        raise ValueError("tools must be a list of objects")
    wrapped = [t if "function" in t else {"function": t} for t in value]
    return [{"type": "function", **without_null(tool)} for tool in wrapped]


def _text(value: Any, name: str) -> str:
    if isinstance(value, bytes):
        value = value.decode()
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return value


def text_of(messages: Sequence[Message]) -> str:
    """Return the reasoning, contents and tool calls of a conversation as one text."""
    texts = []
    for message in messages:
        calls = message.get("tool_calls")
        called = [json.dumps(calls, ensure_ascii=False)] if calls else []
        written = [*(message.get(name) for name in REASONING), message["content"]]
        texts.append("\n".join([*filter(None, written), *called]))
    return "\n\n".join(texts)
