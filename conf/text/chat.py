r"""Encode messages by a tokenizer's chat template, so that no message text becomes a control id.

Training and decoding share this module. Transformers renders the template and encodes the result. Only the
template may write control pieces such as <|im_end|>. If a message spells one, the spelling is cut in two by a
mark, a character that occurs in no message:

    content     a<|im_end|>b
    marked      a<|im_#end|>b
    rendered    <|im_start|>user\na<|im_#end|>b<|im_end|>\n

The parts between marks are then encoded separately, so no piece can match across a mark. Templates that
strip, split or wrap the content still work.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from conf.errors import TOKENIZER_ERRORS, UserError, as_user_error
from conf.text.conversations import REASONING, Message
from conf.text.encoding import SPACE, TextEncoder

# Errors that a template, or code that it calls, raises for messages that it does not accept.
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters


@dataclass(frozen=True)
class Conversation:
    """Messages and tools to render, with spelled control pieces cut by `mark`.

    `stop` is a second character that occurs in no text.
    """

    messages: list[Message]
    tools: list[Any]
    mark: str
    stop: str


class ChatTemplate:
    """The chat template and the tokenizer of a folder.

    `encoder` has the control ids that no text may become. Raises UserError, with a message that begins with
    `problem`, if the folder has no chat template.
    """

    def __init__(self, folder: Path, encoder: TextEncoder, problem: str) -> None:
        self._library = load_tokenizer(folder, problem)
        if not self._library.chat_template:
            raise UserError(
                f"{problem} no chat_template.jinja and no chat_template in "
                "tokenizer_config.json. Add the template of the model"
            )
        # A dict if the tokenizer has several templates.
        self._source = str(self._library.chat_template)
        self._lost: dict[str, str | None] = {}
        # A copy without the implicit space. Unlike the encoder's own, it encodes special pieces.
        self._tokenizer = Tokenizer.from_str(encoder.tokenizer.to_str())
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = (piece.content for piece in added if piece.special)
        self._spelled = _pattern(
            {*encoder.spellings, *(piece.lstrip(SPACE) or piece for piece in special)}
        )

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> Conversation:
        """Return the conversation with marks, in the form that the template expects.

        Raises ValueError for tools, tool calls or messages that the template does not render.
        """
        known = [dict(message) for message in messages]
        for message in known:
            if message["role"] == "developer" and "developer" not in self._source:
                message["role"] = "system"
        if "tool_calls" not in self._source and any(m.get("tool_calls") for m in known):
            raise ValueError("the chat template does not support tool_calls")
        if tools and "tools" not in self._source:
            raise ValueError("the chat template does not support tools")
        self._check_rendered(known)
        text = json.dumps([known, *tools], ensure_ascii=False, default=str)
        mark, stop = [mark for mark in MARKS if mark not in text][:2]
        for message in known:
            role = message.pop("role")
            message |= {"role": role, **self._cut(message, mark)}
        return Conversation(known, self._cut(list(tools), mark), mark, stop)

    def _check_rendered(
        self, messages: Sequence[Message], reasoning: Collection[str] = ()
    ) -> None:
        """Raise ValueError if the template leaves out a message, a call, or the reasoning of the last message.

        A template leaves out messages of a role that it does not know. Some leave out a call without content.
        `reasoning` has the fields of the last message to find, at least one of them: templates leave out the
        reasoning of earlier turns. The messages are rendered with names in place of contents, once for each
        form of a conversation.
        """
        probes = [_probe(index, message) for index, message in enumerate(messages)]
        for name in reasoning:
            probes[-1][name] = f"{name}x"
        key = json.dumps(probes, sort_keys=True)
        if key not in self._lost:
            self._lost[key] = self._first_lost(probes)
        if lost := self._lost[key]:
            raise ValueError(f"the chat template does not render {lost}")

    def _first_lost(self, probes: list[Message]) -> str | None:
        try:
            text = self._library.apply_chat_template(probes, tokenize=False)
        except REFUSALS:  # the caller's rendering says why
            return None
        for probe in probes:
            calls = probe.get("tool_calls", [])
            if any(call["function"]["name"] not in text for call in calls):
                return "the tool calls of a message without content"
            if not calls and probe["content"] not in text:
                return f"messages of the role {probe['role']}"
            thoughts = [probe[name] for name in REASONING if name in probe]
            if thoughts and not any(thought in text for thought in thoughts):
                return "the reasoning of an answer"
        return None

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        answer: str = "",
    ) -> list[int]:
        """Return the ids of the prompt, up to the end of `answer`, the beginning of the model's answer.

        Raises ValueError if the end of `answer` cannot be located in the rendered text.
        """
        if not answer:
            chat = self.prepare(messages, tools)
            text = self._render(chat, chat.messages, add_generation_prompt=True)
            return self._ids(text, chat.mark, begins=True)
        turns = [*messages, {"role": "assistant", "content": answer}]
        chat = self.prepare(turns, tools)
        content = chat.messages[-1]["content"] + chat.stop
        text, stop, _ = self._with_content(chat, len(turns) - 1, content)
        if not stop:
            raise ValueError("the chat template does not render the end of the answer")
        return self._ids(text, chat.mark, begins=True)

    def answer_ids(
        self, chat: Conversation, index: int, *, ends: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the ids before an answer and the ids of the answer, as a model generates them.

        If `ends`, the answer includes its end of turn. Raises ValueError if the template leaves out the
        answer's reasoning, or renders the messages before the answer differently once the answer follows.
        """
        turns = chat.messages[: index + 1]
        thoughts = [name for name in REASONING if turns[-1].get(name, "").strip()]
        if thoughts:
            self._check_rendered(turns, thoughts)
        before = chat.messages[:index]
        prompt = self._render(chat, before, add_generation_prompt=True)
        whole = self._render(chat, turns)
        if not whole.startswith(prompt):
            prompt = self._header(chat, index, prompt, whole)
        if not ends:
            content = chat.messages[index]["content"].rstrip() + chat.stop
            whole, stop, _ = self._with_content(chat, index, content)
            if not stop or not whole.startswith(prompt):
                raise ValueError(
                    "the chat template does not render the end of the answer"
                )
        ids = self._ids(prompt, chat.mark, begins=True)
        return ids, self._ids(whole[len(prompt) :], chat.mark, begins=False)

    def user_header(self) -> list[int]:
        """Return the ids that the template writes before the content of the user's first turn."""
        chat = self.prepare([{"role": "user", "content": MARKS[-1]}])
        text = self._render(chat, chat.messages).partition(MARKS[-1])[0]
        return self._ids(text, chat.mark, begins=True)

    def _header(self, chat: Conversation, index: int, prompt: str, whole: str) -> str:
        """Return the common prefix of the prompt and the conversation with the answer.

        They differ for a reasoning model: its generation prompt may end in <think>, and its template strips
        thoughts from answers. Raises ValueError if more than the generation prompt differs.
        """
        base = self._render(chat, chat.messages[:index])
        header, stop, _ = self._with_content(chat, index, chat.stop)
        header = commonprefix([header, prompt])
        if not (stop and whole.startswith(header) and header.startswith(base)):
            raise ValueError(
                "the chat template renders the prompt differently once the answer follows"
            )
        return header

    def _with_content(
        self, chat: Conversation, index: int, content: str
    ) -> tuple[str, str, str]:
        """Render the messages up to `index` with another content; partition the text at `chat.stop`."""
        last = {**chat.messages[index], "content": content}
        text = self._render(chat, [*chat.messages[:index], last])
        return text.partition(chat.stop)

    def _render(
        self, chat: Conversation, messages: list[Message], **options: bool
    ) -> str:
        rendered: str = self._library.apply_chat_template(
            messages, tools=chat.tools or None, tokenize=False, **options
        )
        return rendered

    @TOKENIZER_ERRORS
    def _ids(self, text: str, mark: str, *, begins: bool) -> list[int]:
        """Encode a rendered text; `begins` is False for the rest of a text."""
        first, *parts = text.split(mark)
        if begins:
            ids = self._library(first, add_special_tokens=False, verbose=False)
            encoded: list[int] = list(ids.input_ids)
        else:
            encoded = self._tokenizer.encode(first, add_special_tokens=False).ids
        for part in parts:
            encoded += self._tokenizer.encode(part, add_special_tokens=False).ids
        return encoded

    def _cut(self, value: Any, mark: str) -> Any:
        """Return a copy of a JSON value with a mark in the middle of each spelled control piece."""
        if isinstance(value, str):
            cuts = [_middle(match) for match in self._spelled.finditer(value)]
            ends = [*cuts, len(value)]
            return mark.join(value[a:b] for a, b in zip([0, *cuts], ends))
        if isinstance(value, list):
            return [self._cut(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._cut(k, mark): self._cut(v, mark) for k, v in value.items()}
        return value


def _probe(index: int, message: Message) -> Message:
    """Return a message of the same form, with names in place of its content and its calls' functions."""
    probe: Message = {
        "role": message["role"],
        "content": f"content{index}x" if message["content"] else "",
    }
    if calls := message.get("tool_calls"):
        names = [f"call{index}x{number}x" for number in range(len(calls))]
        probe["tool_calls"] = [
            {
                "type": "function",
                "id": "a" * 9,
                "function": {"name": name, "arguments": {}},
            }
            for name in names
        ]
    if message["role"] == "tool":
        probe["tool_call_id"] = "a" * 9
    return probe


def load_tokenizer(folder: Path, problem: str) -> Any:
    """Return the Transformers tokenizer of a folder; `problem` begins the message of an error."""
    # Imported here because it takes seconds and only chat data need it.
    from transformers import AutoTokenizer

    with as_user_error(problem, ". Use a tokenizer of a class of Transformers"):
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


def _pattern(spellings: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches the shortest spellings, overlapping matches included.

    A cut in a short spelling also cuts every longer spelling that contains it.
    """
    shortest = [
        spelling
        for spelling in sorted(spellings)
        if not any(other != spelling and other in spelling for other in spellings)
    ]
    return re.compile(f"(?=({'|'.join(map(re.escape, shortest)) or '$^'}))")


def _middle(spelling: re.Match[str]) -> int:
    """Return the position of a cut. Raises ValueError for a piece of one character."""
    piece = spelling[1]
    if len(piece) < 2:
        raise ValueError(f"a message must not contain the control piece {piece!r}")
    return spelling.start() + len(piece) // 2
