"""python -m infer.regenerate: the model's own text, after training documents or prompts.

    OUT/own-00000.jsonl   of a document: id, language, content, prefix: the first `prefix`
                          characters of `content` are the document's own, the rest is
                          the model's; of a prompt: id, language, messages (the last
                          message is the model's), and ends: whether the model ended it
    OUT/manifest.json     written last

`python -m data_prep experiment=own` prepares continued documents, experiment=own_chat
answers. Under torchrun the texts are divided over the ranks in batches, each of which is
saved as soon as it is done. Neither the number of ranks nor a kill changes a byte.

Only documents of the training split are continued, because validation must not be
trained on. Infilling documents and the rests of documents that were cut are left out.
With `question` a document's prefix becomes a prompt: the question, and the prefix as a
block of code. Prompts also come from files, or from the model itself as in Magpie (arXiv
2406.08464): it continues the header of a user's turn. A text is cut where it begins to
loop.
"""

import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.console import print_line, print_once
from conf.errors import UserError
from conf.runs.files import write_bytes
from conf.runs.fingerprint import fingerprint_file
from conf.runs.stage import (
    collect_provenance,
    is_finished,
    read_manifest,
    write_manifest,
)
from conf.settings.cli import run
from conf.settings.schema import check_settings, setting
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from infer.config import DTYPES, DecodeConfig, check_directory
from infer.engine.sampling import Sampling, seed_from

if TYPE_CHECKING:
    from infer.api import Model
    from infer.text import Text

KIND = "own_text"
PLAIN = 0  # data_prep.encode.Mode.PLAIN: a span that is not laid out for infilling
UNITS = "units"  # the folder of finished batches; removed at the end
SHARD_DOCUMENTS = 4096
LOOP_TOKENS = 20  # the fewest tokens that a loop repeats
OWN_PROMPT_TOKENS = 64  # a user's turn that is longer is left out


@dataclass
class DocumentsConfig:
    """The documents to continue."""

    #: a finished folder of data_prep, with the model's tokenizer; null: prompts are given
    path: str | None = setting(None, path=True)


@dataclass
class RegenerateConfig:
    """python -m infer.regenerate: training documents or prompts, continued by the model.

    A text depends on the seed and the id of its document or prompt, not on its batch.
    """

    #: a Transformers directory or hub name, with or without adaptive tokens
    model: str = setting(hub="model")
    data: DocumentsConfig = field(default_factory=DocumentsConfig)
    #: prompts to answer: files of rows or hub data sets with messages or questions
    prompts: list[str] = setting([], path=True)
    #: answer this question about each document, in place of continuing it: the prompt is
    #: the question and the document's prefix as a block of code
    question: str = ""
    #: prompts that the model makes itself
    own_prompts: int = setting(0, least=0)
    #: the folder to write
    out: str = setting(path=True)
    #: tokens to add to a prefix, at most
    max_new_tokens: int = setting(256, least=1)
    #: of sampling; 0: the likeliest token
    temperature: float = setting(0.0, least=0)
    #: share of texts that are sampled at `temperature`; the others are greedy
    sampled: float = setting(1.0, least=0, most=1)
    #: draws the documents, their prefixes and the noise of sampling
    seed: int = setting(0, least=0)
    #: the most documents or prompts of files, drawn by the seed; null: all
    documents: int | None = setting(None, least=1)
    #: the shortest prefix of a document, in tokens
    prefix_min: int = setting(16, least=1)
    #: the longest prefix of a document, in tokens; each length is as likely
    prefix_max: int = setting(64, least=1)
    #: documents that are decoded side by side and saved together
    batch: int = setting(64, least=1)
    #: of the weights; auto: bfloat16 where the device has instructions for it; int8: on a CPU, faster, by
    #: rounded weights
    dtype: str = setting("auto", choices=DTYPES)

    def __post_init__(self) -> None:
        check_settings(self)
        Sampling(self.temperature)  # raises for one that is too low
        if (self.data.path is None) == (not self.prompts and not self.own_prompts):
            raise ValueError(
                "data.path must be given, or prompts or own_prompts, got "
                f"{self.data.path}, {self.prompts} and {self.own_prompts}. Give one kind."
            )
        if self.question and self.data.path is None:
            raise ValueError(
                "question must be about the documents of data.path, got data.path=null. "
                "Give data.path, or leave question empty."
            )
        if self.prefix_max < self.prefix_min:
            raise ValueError(
                f"prefix_max must be at least prefix_min={self.prefix_min}, "
                f"got {self.prefix_max}. Raise it."
            )

    def temperature_of(self, text: "DocumentSpan | ChatPrompt") -> float:
        """Return the temperature of a text, drawn by the seed and the text's id."""
        return self.decode(text.id).temperature

    def decode(self, id: str) -> DecodeConfig:
        """How a text is made: without drafts, many side by side."""
        draw = random.Random(seed_from(self.seed, "sampled", id)).random()
        return DecodeConfig(
            "plain",
            temperature=self.temperature if draw < self.sampled else 0.0,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
        )


@dataclass(frozen=True)
class DocumentSpan:
    """A document of the training split: tokens start:stop of a packed sequence."""

    id: str
    language: str
    sequence: int
    start: int
    stop: int


class TrainingDocuments:
    """The training documents of `data.path`, in an order that the seed decides."""

    def __init__(self, config: RegenerateConfig) -> None:
        self._config = config
        self._path = str(config.data.path)
        self._manifest = read_manifest(self._path, "shards", "data.path")
        self._vocab = Vocab.from_json(self._manifest["vocab"])
        self._shards = Shards(self._path, "train")

    def check_tokenizer(self, text: "Text") -> None:
        """Raise UserError if the model has another piece for an id of the shards."""
        path = self._path
        tokenizer = load_tokenizer(Path(path) / TOKENIZER)
        for piece, id in tokenizer.get_vocab(with_added_tokens=True).items():
            if id < self._vocab.text_size and text.pieces.get(id) != piece:
                raise UserError(
                    f"data.path={path} must be prepared with the tokenizer of "
                    f"model={self._config.model}, got another piece for id {id}. "
                    f"Prepare the data with tokenizer={self._config.model}."
                )

    def drawn(self) -> list[DocumentSpan]:
        """Return the documents to continue, in order. Raise UserError for none."""
        documents = list(islice(self._suitable(), self._config.documents))
        if not documents:
            raise UserError(
                f"data.path={self._path} must have training documents in "
                f"plain layout of more than prefix_min={self._config.prefix_min} "
                "tokens, got none. Lower prefix_min."
            )
        return documents

    def prompt(self, document: DocumentSpan) -> list[int]:
        """Return the ids of the document's opening and prefix.

        Its id and the seed decide the length. At least one token of the document,
        which may be its end, is left to the model.
        """
        config = self._config
        opening = int(self._vocab.bos is not None)
        longest = min(config.prefix_max, document.stop - document.start - opening - 1)
        rng = random.Random(seed_from(config.seed, "prefix", document.id))
        length = rng.randint(config.prefix_min, longest)
        tokens = self._shards[document.sequence].tokens
        prefix: list[int] = tokens[document.start :][: opening + length].tolist()
        return prefix

    def write(
        self, model: "Model", documents: Sequence[DocumentSpan]
    ) -> list[dict[str, Any]]:
        """Continue documents side by side, or answer the question about each.

        Returns their rows of a shard.
        """
        least = self._config.prefix_min
        prompts = [whole_lines(model.text, self.prompt(d), least) for d in documents]
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


@dataclass(frozen=True)
class ChatPrompt:
    """Messages to answer; none where the model makes the prompt itself."""

    id: str
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # that the messages may call


class ChatPrompts:
    """The prompts of files in an order that the seed decides, then the model's own."""

    def __init__(self, config: RegenerateConfig) -> None:
        self._config = config

    def check_tokenizer(self, text: "Text") -> None:
        """Do nothing: prompts are text."""

    def drawn(self) -> list[ChatPrompt]:
        """Return the prompts, in order. Raises UserError for files without prompts.

        Rows without a prompt are counted on standard error.
        """
        from infer.bench.prompts import (
            NoPrompt,
            messages_of,
            report_bad,
            rows_of,
            tools_in,
        )

        given = []
        for source in self._config.prompts:
            bad: list[str] = []
            for index, row in enumerate(rows_of(source, bad)):
                try:
                    messages, tools = messages_of(row), tuple(tools_in(row))
                    given.append(ChatPrompt(f"{source}:{index}", messages, tools))
                except NoPrompt as error:
                    bad.append(str(error))
            report_bad(source, bad)
        random.Random(self._config.seed).shuffle(given)
        own = [ChatPrompt(f"own:{n}") for n in range(self._config.own_prompts)]
        if not given and not own:
            raise UserError(f"prompts={self._config.prompts} must have rows, got none")
        return given[: self._config.documents] + own

    def write(
        self, model: "Model", prompts: Sequence[ChatPrompt]
    ) -> list[dict[str, Any]]:
        """Answer prompts side by side; return rows of a shard, fewer than prompts."""
        given = {prompt.id: list(prompt.messages) for prompt in prompts}
        given |= self._own_prompts(model, [id for id in given if not given[id]])
        given = {id: messages for id, messages in given.items() if messages}
        tools = {prompt.id: list(prompt.tools) for prompt in prompts}
        return answers(model, given, self._config, tools)

    def _own_prompts(
        self, model: "Model", ids: Sequence[str]
    ) -> dict[str, list[dict[str, str]]]:
        """Return the model's sampled user turns by id; [] for one that is of no use."""
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
            content = model.text.decode(turn).strip()
            useful = content and turn[-1] in model.eos and before_loop(turn) == turn
            prompts[id] = [{"role": "user", "content": content}] if useful else []
        return prompts


def ask(question: str, code: str, language: str) -> dict[str, str]:
    """Return a user's message: the question, and the code as a block of its language."""
    block = f"```{language}\n{code.rstrip()}\n```"
    return {"role": "user", "content": f"{question}\n\n{block}"}


def answers(
    model: "Model",
    given: Mapping[str, list[dict[str, Any]]],
    config: RegenerateConfig,
    tools: Mapping[str, list[dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """Answer messages side by side; return rows of a shard, fewer than prompts.

    `given` has the messages and `tools` the tools by the id of a prompt. An empty answer,
    messages that the chat template refuses, and a prompt beyond the context are left out.
    """
    from infer.chat import UnfitMessages, chat_ids

    tools = tools or {}
    longest = model.context - config.max_new_tokens
    if longest < 1:
        raise UserError(
            f"max_new_tokens must be below the model's context of {model.context} "
            f"tokens, got {config.max_new_tokens}"
        )
    ids: dict[str, list[int]] = {}
    for id, messages in given.items():
        try:
            ids[id] = chat_ids(Path(config.model), messages, tools=tools.get(id, []))
        except UnfitMessages as error:
            print_line(f"regenerate: {id} is left out: {error}", error=True)
    ids = {id: prompt for id, prompt in ids.items() if len(prompt) <= longest}
    texts = complete(model, list(ids.values()), list(ids), config)
    rows = []
    for id, tokens in zip(ids, texts, strict=True):
        kept = before_loop(tokens)
        answer = {"role": "assistant", "content": model.text.decode(kept)}
        if answer["content"].strip():
            row = {
                "id": id,
                "language": "chat",
                "messages": [*given[id], answer],
                "ends": kept == tokens and tokens[-1] in model.eos,
            }
            rows.append(row | ({"tools": tools[id]} if tools.get(id) else {}))
    return rows


def whole_lines(text: "Text", prompt: list[int], least: int) -> list[int]:
    """Return a prompt's lines that have ended, if they are `least` tokens.

    Code is asked for where a line ends; in the middle of one a small model loses its way.
    """
    lines, end, _ = text.decode(prompt).rpartition("\n")
    ids = text.encode(lines + end)
    return ids if len(ids) >= least else prompt


def before_loop(ids: list[int], least: int = LOOP_TOKENS) -> list[int]:
    """Return the ids up to the end of a loop's first period, or all ids.

    A loop repeats its period at once and whole, and at least `least` ids: a small model
    does not leave it. A line of code that an answer quotes again is no loop.
    """
    tokens = np.asarray(ids)
    ends = [len(ids)]
    for period in range(1, len(ids) // 2 + 1):
        same = tokens[period:] == tokens[:-period]
        length = max(period, least)
        if len(same) >= length:
            run = np.lib.stride_tricks.sliding_window_view(same, length).all(axis=1)
            if run.any():
                ends.append(int(run.argmax()) + period)
    return ids[: min(ends)]


def main(config: RegenerateConfig) -> None:
    """Continue the documents, unless the folder already holds the result."""
    check_directory(config.model)
    inputs = {"model": config.model}
    if config.data.path:
        inputs["data.path"] = config.data.path
    origin = collect_provenance(config, inputs)
    for file in filter(os.path.isfile, config.prompts):
        origin["inputs"][file] = fingerprint_file(Path(file))
    source: TrainingDocuments | ChatPrompts
    source = TrainingDocuments(config) if config.data.path else ChatPrompts(config)
    if is_finished(config.out, KIND, origin):
        line = f"{config.out} is finished: nothing to do"
    else:
        line = f"{write_own_text(config, source, origin)} texts"
    print_once(f"regenerate: {line}")


def write_own_text(
    config: RegenerateConfig,
    source: "TrainingDocuments | ChatPrompts",
    origin: dict[str, Any],
) -> int:
    """Write `out`, together with the other ranks; return rank 0's number of texts."""
    # Imported late: PyTorch is not loaded for a mistake, or for what is finished.
    from conf.devices.dtype import choose_dtype
    from infer.api import load
    from infer.bench.harness import Records, init_workers, result_folder
    from infer.models.checkpoint import ModelDirectory

    workers = init_workers()
    dtype = workers.agreed(choose_dtype(config.dtype))
    source.check_tokenizer(ModelDirectory(config.model).text)
    batches: dict[str, Sequence[Any]] = {}
    # A batch has one temperature: its texts are decoded together.
    documents: Sequence[Any] = sorted(source.drawn(), key=config.temperature_of)
    for temperature, group in groupby(documents, config.temperature_of):
        texts = list(group)
        for start in range(0, len(texts), config.batch):
            batches[f"{temperature:g}-{start:08}"] = texts[start:][: config.batch]
    with result_folder(config.out, origin, workers) as partial:
        units = Records(partial / UNITS, list(batches))
        model = load(config.model, dtype, workers.device())

        def unit(name: str) -> dict[str, Any]:
            return {"rows": source.write(model, batches[name])}

        units.make(workers, "batches of texts", unit)
        written = 0
        if workers.first:  # it removes the batches: no other rank may read them
            rows = (units.load(name)["rows"] for name in batches)
            written = write_shards(partial, rows)
            write_manifest(partial, KIND, origin, documents=written)
            shutil.rmtree(partial / UNITS)
    return written


def complete(
    model: "Model",
    prompts: Sequence[list[int]],
    names: Sequence[str],
    config: RegenerateConfig,
) -> list[list[int]]:
    """Return the new ids of prompts, decoded side by side at the temperature of the first.

    `names` decide their seeds.
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

    The length is in characters. Half a character at the end is left out.
    """
    stream = text.stream(opens=True)
    prefix = "".join(map(stream, prompt))
    return {"content": prefix + "".join(map(stream, new)), "prefix": len(prefix)}


def write_shards(folder: Path, batches: Iterable[list[dict[str, Any]]]) -> int:
    """Write the rows of all batches, in their order; return their number."""
    lines = (
        json.dumps(row, ensure_ascii=False).encode() + b"\n"
        for rows in batches
        for row in rows
    )
    total = 0
    for index in count():
        shard = list(islice(lines, SHARD_DOCUMENTS))
        if not shard:
            break
        write_bytes(folder / f"own-{index:05}.jsonl", b"".join(shard))
        total += len(shard)
    return total


if __name__ == "__main__":
    run("regenerate", RegenerateConfig, main)
