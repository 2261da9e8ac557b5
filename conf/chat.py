r"""Messages to token ids by a tokenizer's chat template; no message becomes a control id.

Training and decoding share this. Transformers renders and encodes, unless a message spells a control piece
(<|im_end|>), which only the template may write. Each such spelling is then cut in two by a mark, a character
that no text has:

    content     a<|im_end|>b
    marked      a<|im_#end|>b
    rendered    <|im_start|>user\na<|im_#end|>b<|im_end|>\n

and what lies between marks is encoded apart, so no piece can be matched over one. Templates that strip,
split or wrap a content work as before.
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

from conf.conversations import Message
from conf.encoding import SPACE, TextEncoder
from conf.errors import TOKENIZING, Refusing, UserError

# Errors of a template about messages, its own and those of the code that it calls.
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # characters for internal use


@dataclass(frozen=True)
class Conversation:
    """Messages and tools to render, their spellings of control pieces cut by `mark`.

    `stop` is a second character that no text has.
    """

    messages: list[Message]
    tools: list[Any]
    mark: str
    stop: str


class ChatTemplate:
    """The chat template in a folder, and the tokenizer beside it.

    Raises UserError where there is none; `problem` begins its sentence. `encoder` knows the ids that no text
    may become.
    """

    def __init__(self, folder: Path, encoder: TextEncoder, problem: str) -> None:
        self._library = load_tokenizer(folder, problem)
        if not self._library.chat_template:
            raise UserError(
                f"{problem} no chat_template.jinja and no chat_template in "
                "tokenizer_config.json. Add the template of the model"
            )
        # What the template calls; a dict if there are several.
        self._source = str(self._library.chat_template)
        # No implicit space; unlike the encoder's own, a copy knows special pieces.
        self._tokenizer = Tokenizer.from_str(encoder.tokenizer.to_str())
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = (piece.content for piece in added if piece.special)
        self._spelled = _pattern(
            {*encoder.spellings, *(piece.lstrip(SPACE) or piece for piece in special)}
        )

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> Conversation:
        """Return a conversation as the template takes it.

        Raises ValueError for a message of a kind that the template has no words for.
        """
        known = [dict(message) for message in messages]
        for message in known:
            if message["role"] == "developer" and "developer" not in self._source:
                message["role"] = "system"
        if "tool_calls" not in self._source and any(m.get("tool_calls") for m in known):
            raise ValueError("the chat template has no words for tool_calls")
        if tools and "tools" not in self._source:
            raise ValueError("the chat template has no words for tools")
        text = json.dumps([known, *tools], ensure_ascii=False, default=str)
        mark, stop = [mark for mark in MARKS if mark not in text][:2]
        for message in known:
            role = message.pop("role")
            message |= {"role": role, **self._cut(message, mark)}
        return Conversation(known, self._cut(list(tools), mark), mark, stop)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        answer: str = "",
    ) -> list[int]:
        """Return the ids up to the answer's start, or up to the end of `answer`, which begins it.

        Raises ValueError if the template does not show the end of `answer`.
        """
        if not answer:
            chat = self.prepare(messages, tools)
            text = self._render(chat, chat.messages, add_generation_prompt=True)
            return self._ids(text, chat.mark, begins=True)
        turns = [*messages, {"role": "assistant", "content": answer}]
        chat = self.prepare(turns, tools)
        content = chat.messages[-1]["content"] + chat.stop
        text, found, _ = self._with_content(chat, len(turns) - 1, content)
        if not found:
            raise ValueError("the chat template does not show the answer's end")
        return self._ids(text, chat.mark, begins=True)

    def answer_ids(
        self, chat: Conversation, index: int, *, ends: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the ids before an answer, and the answer's, as a model generates them.

        `ends`: with what follows the answer's content, its end of turn. Raises ValueError if the template
        renders the messages before the answer otherwise once it follows.
        """
        before = chat.messages[:index]
        prompt = self._render(chat, before, add_generation_prompt=True)
        whole = self._render(chat, chat.messages[: index + 1])
        if not whole.startswith(prompt):
            prompt = self._header(chat, index, prompt, whole)
        if not ends:
            content = chat.messages[index]["content"].rstrip() + chat.stop
            whole, found, _ = self._with_content(chat, index, content)
            if not found or not whole.startswith(prompt):
                raise ValueError("the chat template does not show the answer's end")
        ids = self._ids(prompt, chat.mark, begins=True)
        return ids, self._ids(whole[len(prompt) :], chat.mark, begins=False)

    def user_header(self) -> list[int]:
        """Return the ids by which the template opens the user's first turn."""
        chat = self.prepare([{"role": "user", "content": MARKS[-1]}])
        text = self._render(chat, chat.messages).partition(MARKS[-1])[0]
        return self._ids(text, chat.mark, begins=True)

    def _header(self, chat: Conversation, index: int, prompt: str, whole: str) -> str:
        """Return the prompt as far as the conversation with the answer begins with it.

        A reasoning model's generation prompt may end in <think>, and its template strips the thoughts of
        answers. Raises ValueError if more than the generation prompt differs.
        """
        base = self._render(chat, chat.messages[:index])
        header, found, _ = self._with_content(chat, index, chat.stop)
        header = commonprefix([header, prompt])
        if not (found and whole.startswith(header) and header.startswith(base)):
            raise ValueError(
                "the chat template's rendering of the conversation does not begin with "
                "that of its prompt"
            )
        return header

    def _with_content(
        self, chat: Conversation, index: int, content: str
    ) -> tuple[str, str, str]:
        """Return the rendered text before `chat.stop` in another content of a message."""
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

    @TOKENIZING
    def _ids(self, text: str, mark: str, *, begins: bool) -> list[int]:
        """Encode a rendered text; `begins`: it is not the rest of another."""
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
        """Return a value with a mark in the middle of each control piece that its texts spell."""
        if isinstance(value, str):
            cuts = [_middle(match) for match in self._spelled.finditer(value)]
            ends = [*cuts, len(value)]
            return mark.join(value[a:b] for a, b in zip([0, *cuts], ends))
        if isinstance(value, list):
            return [self._cut(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._cut(k, mark): self._cut(v, mark) for k, v in value.items()}
        return value


def load_tokenizer(folder: Path, problem: str) -> Any:
    """Return the tokenizer of Transformers in a folder; `problem` begins the error's sentence."""
    # Imported late: it takes seconds, and other data do not need it.
    from transformers import AutoTokenizer

    with Refusing(problem, ". Use a tokenizer of one of Transformers' own classes"):
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


def _pattern(spellings: Collection[str]) -> re.Pattern[str]:
    """Return what matches the shortest of spellings, also where two overlap.

    A cut in one cuts those that contain it.
    """
    shortest = [
        one
        for one in sorted(spellings)
        if not any(other != one and other in one for other in spellings)
    ]
    return re.compile(f"(?=({'|'.join(map(re.escape, shortest)) or '$^'}))")


def _middle(spelling: re.Match[str]) -> int:
    """Return the place of a cut. Raises ValueError for a piece of one character."""
    piece = spelling[1]
    if len(piece) < 2:
        raise ValueError(f"a message must not contain the control piece {piece!r}")
    return spelling.start() + len(piece) // 2
