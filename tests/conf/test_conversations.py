"""Rows of chat data in the published formats (the table in docs/data.md) become messages."""

import json
from typing import Any

import pytest

from conf.text.conversations import NoConversation, conversation, tools_of

ASK = {"role": "user", "content": "Add 2 and 3."}
ANSWER = {"role": "assistant", "content": "5"}
CALL = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 2}'}}
CALLED = {
    "type": "function",
    "id": "c1",
    "function": {"name": "add", "arguments": {"a": 2}},
}
USE = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
RESULT = {"role": "tool", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}


def share(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in turns]


FORMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "OpenAI": ({"messages": [SYSTEM, ASK, ANSWER]}, [SYSTEM, ASK, ANSWER]),
    "ShareGPT": (
        {"conversations": share(("human", "Add 2 and 3."), ("gpt", "5"))},
        [ASK, ANSWER],
    ),
    "ShareGPT with a system column": (
        {
            "system": "Be brief.",
            "conversations": share(("human", "Add 2 and 3."), ("gpt", "5")),
        },
        [SYSTEM, ASK, ANSWER],
    ),
    "ShareGPT with tools": (
        {
            "conversations": share(
                ("human", "Add 2 and 3."),
                ("function_call", '{"name": "add", "arguments": {"a": 2}}'),
                ("observation", "5"),
                ("gpt", "5"),
            )
        },
        [
            ASK,
            USE | {"tool_calls": [{k: CALLED[k] for k in ("type", "function")}]},
            RESULT,
            ANSWER,
        ],
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 and 3", "output": "5"},
        [ASK | {"content": "Add.\n\n2 and 3"}, ANSWER],
    ),
    "Alpaca without input": (
        {"instruction": "Add 2 and 3.", "input": "", "output": "5"},
        [ASK, ANSWER],
    ),
    "Dolly": (
        {"instruction": "Add.", "context": "2 and 3", "response": "5"},
        [ASK | {"content": "Add.\n\n2 and 3"}, ANSWER],
    ),
    "Alpaca with history": (
        {
            "instruction": "Add.",
            "input": "2 and 3",
            "output": "5",
            "history": [["Hi.", "Hello."]],
            "system": "Be brief.",
        },
        [
            SYSTEM,
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Hello."},
            ASK | {"content": "Add.\n\n2 and 3"},
            ANSWER,
        ],
    ),
    "OpenOrca": (
        {"system_prompt": "Be brief.", "question": "Add 2 and 3.", "response": "5"},
        [SYSTEM, ASK, ANSWER],
    ),
    "question with a context": (
        {"context": "2 and 3", "question": "Add.", "answer": "5"},
        [ASK | {"content": "Add.\n\n2 and 3"}, ANSWER],
    ),
    "prompt and completion": (
        {"prompt": "Add 2 and 3.", "completion": "5"},
        [ASK, ANSWER],
    ),
    "TRL's prompt and completion": (
        {"prompt": [SYSTEM, ASK], "completion": [ANSWER]},
        [SYSTEM, ASK, ANSWER],
    ),
    "question and answer": ({"question": "Add 2 and 3.", "answer": "5"}, [ASK, ANSWER]),
    "a cell of CSV in JSON": (
        {"messages": json.dumps([ASK, ANSWER])},
        [ASK, ANSWER],
    ),
    "a cell of CSV by pandas": ({"messages": str([ASK, ANSWER])}, [ASK, ANSWER]),
    "tool calls, content null": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                RESULT | {"tool_call_id": "c1"},
                ANSWER,
            ]
        },
        [ASK, USE, RESULT | {"tool_call_id": "c1"}, ANSWER],
    ),
    "an answer of reasoning, content null": (  # as servers of reasoning models return it
        {"messages": [ASK, {"role": "assistant", "content": None, "reasoning": "2+3"}]},
        [ASK, {"role": "assistant", "content": "", "reasoning": "2+3"}],
    ),
    "role function": (
        {"messages": [ASK, {"role": "function", "name": "add", "content": "5"}]},
        [ASK, RESULT | {"name": "add"}],
    ),
    "role developer": (
        {"messages": [SYSTEM | {"role": "developer"}, ASK]},
        [SYSTEM | {"role": "developer"}, ASK],
    ),
    "parts of content": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Add 2 "},
                        {"type": "text", "text": "and 3."},
                    ],
                },
                ANSWER,
            ]
        },
        [ASK, ANSWER],
    ),
    "weight 0": (
        {"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER | {"weight": 1}]},
        [ASK, ANSWER | {"weight": 0}, ASK, ANSWER],
    ),
    "train: false, as of Axolotl": (
        {"messages": [ASK, ANSWER | {"train": False}, ASK, ANSWER | {"train": True}]},
        [ASK, ANSWER | {"weight": 0}, ASK, ANSWER],
    ),
    "an object of lists, as of datasets": (
        {
            "conversations": {
                "from": ["human", "gpt"],
                "value": [ASK["content"], ANSWER["content"]],
                "weight": None,
            }
        },
        [ASK, ANSWER],
    ),
    "null keys of parquet": (
        {"messages": [ASK | {"tool_calls": None, "name": None}, ANSWER]},
        [ASK, ANSWER],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_conversations(form: str) -> None:
    row, expected = FORMS[form]
    assert conversation(row) == expected


def test_messages_keep_their_own_first_message() -> None:
    for role in ("system", "developer"):
        own = [SYSTEM | {"role": role}, ASK, ANSWER]
        assert conversation({"messages": own, "system": "Be kind."}) == own


def test_a_named_column_is_read_alone() -> None:
    row = {"chosen": [ASK, ANSWER], "messages": [ASK]}
    assert conversation(row, "chosen") == [ASK, ANSWER]
    with pytest.raises(NoConversation, match="no chosen, got prompt, completion"):
        conversation({"prompt": "a", "completion": "b"}, "chosen")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a", "label": 1}, "no messages, .*, got text, label"),
        (
            {"question": "a", "answer": "b", "history": "Rome"},
            r"history must be a list of pairs \[question, answer\], got 'Rome'",
        ),
        (
            {"question": "a", "answer": "b", "context": ["c"]},
            "context must be text, got list",
        ),
        ({"messages": "hello"}, "must be a list of messages, got a text"),
        ({"messages": {"role": "user"}}, "must be a list of messages, got an object"),
        (
            {"messages": {"role": ["user"], "content": []}},
            "an object of lists must have lists of the same length",
        ),
        ({"messages": [{"role": "judge", "content": "a"}]}, "a role .* got 'judge'"),
        ({"messages": [{"role": "user", "content": None}]}, "must be text, got null"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text, got int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of content must be text, got 'image_url'",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "a tool call must have a function's name",
        ),
    ],
)
def test_a_malformed_conversation_has_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        conversation(row)


def test_tools_are_converted_for_chat_templates() -> None:
    function = {"name": "add", "parameters": {"type": "object", "extra": None}}
    expected = [
        {
            "type": "function",
            "function": {"name": "add", "parameters": {"type": "object"}},
        }
    ]
    for row in (
        {"tools": [{"type": "function", "function": function}]},
        {"tools": json.dumps([function])},
        {"functions": [function]},
    ):
        assert tools_of(row) == expected
    assert tools_of({"tools": ""}) == []
