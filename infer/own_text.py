"""Generate a model's own text: training documents continued, or prompts answered.

`TrainingDocuments` and `ChatPrompts` choose the texts and write the rows of a batch
(infer/regenerate.py has the format).

Only documents of the training split are continued, because the model must not be trained
on validation documents. Infilling documents and later parts of split documents are skipped.
With `question` a document's prefix becomes a prompt: the question, and the prefix as a
block of code. Prompts also come from files, or from the model itself as in Magpie (arXiv
2406.08464): it continues the header of a user's turn. A text is cut where it begins to
loop.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.console import print_line
from conf.errors import UserError
from conf.runs.stage import read_manifest
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from infer.engine.sampling import seed_from
from infer.prompts import ChatPrompt, read_chat_prompts
from infer.regenerate_config import RegenerateConfig

if TYPE_CHECKING:
    from infer.api import Model
    from infer.text import Text

PLAIN = 0  # data_prep.encode.Mode.PLAIN: a span that is not laid out for infilling
LOOP_TOKENS = 20  # the smallest number of repeated tokens that counts as a loop
OWN_PROMPT_TOKENS = 64  # longer user turns by the model are cut
#: The end of a sentence or line of a user turn, with the spaces after it.
SENTENCE_END = re.compile(r"[.!?](?=\s)|[。！？]|\n")


@dataclass(frozen=True)
class DocumentSpan:
    """A document of the training split: tokens start:stop of a packed sequence."""

    id: str
    language: str
    sequence: int
    start: int
    stop: int


class TrainingDocuments:
    """The training documents of `data.path`, in an order shuffled by the seed."""

    def __init__(self, config: RegenerateConfig) -> None:
        self._config = config
        self._path = str(config.data.path)
        self._manifest = read_manifest(self._path, "shards", "data.path")
        self._vocab = Vocab.from_json(self._manifest["vocab"])
        self._shards = Shards(self._path, "train")

    def check_tokenizer(self, text: "Text") -> None:
        """Raise UserError if an id of the shards is another token in the model."""
        path = self._path
        tokenizer = load_tokenizer(Path(path) / TOKENIZER)
        for piece, id in tokenizer.get_vocab(with_added_tokens=True).items():
            if id < self._vocab.text_size and text.pieces.get(id) != piece:
                raise UserError(
                    f"data.path={path} must be prepared with the tokenizer of "
                    f"model={self._config.model}, got another token for id {id}. "
                    f"Prepare the data with tokenizer={self._config.model}."
                )

    def drawn(self) -> list[DocumentSpan]:
        """Return the documents to continue, in order.

        Raises UserError if no document is suitable.
        """
        documents = list(islice(self._suitable(), self._config.documents))
        if not documents:
            raise UserError(
                f"data.path={self._path} must have training documents in "
                f"plain layout of more than prefix_min={self._config.prefix_min} "
                "tokens, got none. Lower prefix_min."
            )
        return documents

    def prompt(self, document: DocumentSpan) -> list[int]:
        """Return the ids of the document's prefix, with BOS if the vocabulary has it.

        The document's id and the seed determine the prefix's length. At least one token of
        the document, which may be EOS, is left to the model.
        """
        config = self._config
        opening = int(self._vocab.bos is not None)
        longest = min(config.prefix_max, document.stop - document.start - opening - 1)
        rng = random.Random(seed_from(config.seed, "prefix", document.id))
        length = rng.randint(config.prefix_min, longest)
        tokens = self._shards[document.sequence].tokens
        prefix: list[int] = tokens[document.start :][: opening + length].tolist()
        return prefix

    def check_context(
        self, documents: Sequence[DocumentSpan], text: "Text", context: int
    ) -> None:
        """Raise UserError if a document's prefix and its continuation exceed the context."""
        from infer.requests import check_length

        if self._config.question:
            return  # `answers` skips prompts that are too long
        for document in documents:
            check_length(
                self._prefix(document, text),
                f"the prefix of {document.id}",
                new=self._config.max_new_tokens,
                context=context,
                setting="max_new_tokens",
                cure="lower prefix_max",
            )

    def _prefix(self, document: DocumentSpan, text: "Text") -> list[int]:
        return whole_lines(text, self.prompt(document), self._config.prefix_min)

    def write(
        self, model: "Model", documents: Sequence[DocumentSpan]
    ) -> list[dict[str, Any]]:
        """Continue the documents in one batch, or answer the question about each.

        Returns the rows to write.
        """
        prompts = [self._prefix(document, model.text) for document in documents]
        if question := self._config.question:
            given = {
                document.id: [
                    ask(question, model.text.decode(prompt), document.language)
                ]
                for document, prompt in zip(documents, prompts, strict=True)
            }
            return answers(model, given, self._config)
        ids = [document.id for document in documents]
        texts = complete(model, prompts, ids, self._config)
        return [
            {
                "id": document.id,
                "language": document.language,
                **content(model.text, prompt, before_loop(text)),
            }
            for document, prompt, text in zip(documents, prompts, texts, strict=True)
        ]

    def _suitable(self) -> Iterator[DocumentSpan]:
        order = list(range(len(self._shards)))
        random.Random(self._config.seed).shuffle(order)
        languages = self._manifest["languages"]
        for index in order:
            sequence = self._shards[index]
            for span, id in zip(sequence.spans, sequence.ids):
                start = int(span["start"])
                stop = int(span["stop"])
                whole = span["mode"] == PLAIN and span["offset"] == 0
                if whole and stop - start >= self._config.prefix_min + 2:
                    language = languages[span["language"]]
                    yield DocumentSpan(id, language, index, start, stop)


class ChatPrompts:
    """The prompts of files in an order shuffled by the seed, then the model's own."""

    def __init__(self, config: RegenerateConfig) -> None:
        self._config = config

    def check_tokenizer(self, text: "Text") -> None:
        """No-op: prompts are text."""

    def check_context(
        self, prompts: Sequence[ChatPrompt], text: "Text", context: int
    ) -> None:
        """No-op: `answers` skips prompts that are too long."""

    def drawn(self) -> list[ChatPrompt]:
        """Return the prompts, in order. Raises UserError for files without prompts.

        The number of rows without a prompt is printed to standard error.
        """
        given = read_chat_prompts(self._config.prompts)
        random.Random(self._config.seed).shuffle(given)
        own = [ChatPrompt(f"own:{n}") for n in range(self._config.own_prompts)]
        if not given and not own:
            raise UserError(
                f"prompts={self._config.prompts} must have rows with prompts, got none. "
                "Check the files."
            )
        return given[: self._config.documents] + own

    def write(
        self, model: "Model", prompts: Sequence[ChatPrompt]
    ) -> list[dict[str, Any]]:
        """Answer the prompts in one batch and return the rows to write; some may be skipped."""
        given = {prompt.id: list(prompt.messages) for prompt in prompts}
        given |= self._own_prompts(model, [id for id in given if not given[id]])
        given = {id: messages for id, messages in given.items() if messages}
        tools = {prompt.id: list(prompt.tools) for prompt in prompts}
        return answers(model, given, self._config, tools)

    def _own_prompts(
        self, model: "Model", ids: Sequence[str]
    ) -> dict[str, list[dict[str, str]]]:
        """Return user turns sampled from the model, by id.

        A turn that does not end is cut after its last sentence or line. A turn that is then
        empty, and one that loops, becomes [].
        """
        from infer.chat import user_header

        temperature = self._config.temperature or 1.0
        longest = min(OWN_PROMPT_TOKENS, self._config.max_new_tokens)
        sampling = replace(
            self._config,
            temperature=temperature,
            sampled=1.0,
            max_new_tokens=longest,
        )
        header = user_header(Path(self._config.model))
        names = [f"{id}:prompt" for id in ids]
        turns = complete(model, [header] * len(ids), names, sampling)
        prompts: dict[str, list[dict[str, str]]] = {}
        for id, turn in zip(ids, turns, strict=True):
            content = model.text.decode(turn)
            if turn[-1] not in model.eos:
                content = whole_sentences(content)
            content = content.strip()
            useful = content and before_loop(turn) == turn
            prompts[id] = [{"role": "user", "content": content}] if useful else []
        return prompts


def whole_sentences(text: str) -> str:
    """Return the text up to the end of its last whole sentence or line, or "" without one."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


def ask(question: str, code: str, language: str) -> dict[str, str]:
    """Return a user message: the question, then the code as a block of its language."""
    block = f"```{language}\n{code.rstrip()}\n```"
    return {"role": "user", "content": f"{question}\n\n{block}"}


def answers(
    model: "Model",
    given: Mapping[str, list[dict[str, Any]]],
    config: RegenerateConfig,
    tools: Mapping[str, list[dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """Answer conversations in one batch and return the rows to write.

    `given` maps a prompt's id to its messages, `tools` to its tools. Empty answers, messages
    that the chat template refuses, and prompts longer than the context are skipped.
    """
    from infer.chat import UnfitMessages, chat_ids

    tools = tools or {}
    longest = model.context - config.max_new_tokens
    if longest < 1:
        raise UserError(
            f"max_new_tokens must be below the model's context of {model.context} "
            f"tokens, got {config.max_new_tokens}. Lower it."
        )
    ids: dict[str, list[int]] = {}
    for id, messages in given.items():
        try:
            ids[id] = chat_ids(Path(config.model), messages, tools=tools.get(id, []))
        except UnfitMessages as error:
            print_line(f"regenerate: {id} is left out: {error}", error=True)
    for id in [id for id, prompt in ids.items() if len(prompt) > longest]:
        print_line(
            f"regenerate: {id} is left out: {len(ids.pop(id)):,} tokens, and max_new_tokens "
            f"leaves {longest:,} in the model's context",
            error=True,
        )
    texts = complete(model, list(ids.values()), list(ids), config)
    rows = []
    for id, tokens in zip(ids, texts, strict=True):
        kept = before_loop(tokens)
        answer = {"role": "assistant", "content": model.text.decode(kept)}
        if answer["content"].strip():
            ends = kept == tokens and tokens[-1] in model.eos
            rows.append(chat_row(id, [*given[id], answer], ends, tools.get(id, [])))
    return rows


def chat_row(
    id: str,
    messages: Sequence[Mapping[str, Any]],
    ends: bool,
    tools: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the row of an answered prompt; the last message is the answer."""
    row = {"id": id, "language": "chat", "messages": [*messages], "ends": ends}
    return row | ({"tools": [*tools]} if tools else {})


def whole_lines(text: "Text", prompt: list[int], least: int) -> list[int]:
    """Return the prompt up to its last line break, or whole if fewer than `least` ids remain.

    Small models continue code poorly from the middle of a line.
    """
    lines, end, _ = text.decode(prompt).rpartition("\n")
    ids = text.encode(lines + end)
    return ids if len(ids) >= least else prompt


def before_loop(ids: list[int], least: int = LOOP_TOKENS) -> list[int]:
    """Return the ids up to the end of a loop's first period, or all ids without a loop.

    A loop repeats a whole period immediately, and at least `least` ids; a small model does
    not leave it. A line of code that an answer quotes again later is not a loop.
    """
    tokens = np.asarray(ids)
    ends = [len(ids)]
    for period in range(1, len(ids) // 2 + 1):
        same = tokens[period:] == tokens[:-period]
        edges = np.concatenate([[-1], np.flatnonzero(~same), [len(same)]])
        looping = np.diff(edges) > max(period, least)  # runs between two edges
        if looping.any():
            ends.append(int(edges[looping.argmax()]) + 1 + period)
    return ids[: min(ends)]


def complete(
    model: "Model",
    prompts: Sequence[list[int]],
    names: Sequence[str],
    config: RegenerateConfig,
) -> list[list[int]]:
    """Return the new ids of each prompt, decoded as one batch.

    The first prompt determines the temperature. Each prompt's seed derives from its name.
    """
    from infer.api import generate

    if not prompts:
        return []
    seeds = [seed_from(config.seed, name) for name in names]
    texts: list[list[int]] = [[] for _ in prompts]
    for step in generate(model, prompts, config.decode(names[0]), seeds=seeds):
        texts[step.sequence] += step.tokens
    return texts


def content(
    text: "Text", prompt: Sequence[int], new: Sequence[int]
) -> dict[str, str | int]:
    """Return the text of a prompt and its continuation, and the prompt's length.

    The length is in characters. An incomplete character at the end is dropped.
    """
    stream = text.stream(opens=True)
    prefix = "".join(map(stream, prompt))
    return {"content": prefix + "".join(map(stream, new)), "prefix": len(prefix)}
