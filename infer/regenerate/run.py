"""From the settings to shards of JSON lines: documents in units, each continued side by side and kept at once.

    OUT/own-00000.jsonl   id, language, content, prefix: the first `prefix` characters of `content` are the
                          document's own, the rest is the model's
    OUT/manifest.json     written last

A unit is so many documents in their order, whoever does it, so that neither the number of ranks nor a kill
changes a byte of the shards. Documents are of the training split alone: what validation is measured on must not
be trained on. Those laid out for infilling, and the rest of one that a sequence's end cut, are left out.
"""

import hashlib
import json
import random
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from conf import UserError
from conf.console import print_line
from conf.dtype import choose_dtype
from conf.files import write_bytes
from conf.stage import is_finished, made_from, read_manifest, write_manifest
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from infer.api import Model, load
from infer.bench.harness import Records, WorkerGroup, init_workers, result_folder
from infer.engine.memory import enough_memory
from infer.engine.output import Request
from infer.engine.sampling import seed_from
from infer.loop import Limits, decode
from infer.methods import library_processors
from infer.models.checkpoint import ModelDirectory
from infer.regenerate import RegenerateConfig
from infer.text import Text

PLAIN = 0  # the mode of a span that is not laid out for infilling


class DocumentSpan(NamedTuple):
    """A document of the training split, by its place in the shards: tokens start:stop of a sequence."""

    id: str
    language: str
    sequence: int
    start: int
    stop: int


class Source:
    """The training documents of the finished folder `data.path`, in an order that decode.seed decides."""

    def __init__(self, config: RegenerateConfig) -> None:
        self._config = config
        self._path = config.data.path
        self._manifest = read_manifest(self._path, "shards", "data.path")
        self._shards = Shards(self._path, "train")

    def check_tokenizer(self, text: Text) -> None:
        """Raise UserError where an id of the shards is another piece to the model."""
        pieces = load_tokenizer(Path(self._path) / TOKENIZER).get_vocab(
            with_added_tokens=True
        )
        size = Vocab.from_json(self._manifest["vocab"]).text_size
        differing = sorted(
            id
            for piece, id in pieces.items()
            if id < size and text.pieces.get(id) != piece
        )
        if differing:
            model = self._config.model
            raise UserError(
                f"data.path={self._path} must be prepared with the tokenizer of model={model}, got another "
                f"piece for id {differing[0]}. Prepare the data with tokenizer={model}"
            )

    def documents(self) -> list[DocumentSpan]:
        """Draw the documents to continue, in order. Raises UserError for fewer than `documents`."""
        config = self._config
        drawn = list(islice(self._suitable(), config.documents))
        if len(drawn) < (config.documents or 1):
            raise UserError(
                f"documents must be at most {len(drawn)}, got {config.documents or 'all'}: data.path="
                f"{self._path} has no more training documents in plain layout that are longer than "
                f"prefix_min={config.prefix_min} tokens. Lower documents or prefix_min"
            )
        return drawn

    def prompt(self, document: DocumentSpan) -> list[int]:
        """Return the ids of the document's opening and prefix, whose length its id and decode.seed decide.

        At least one token of the document, which may be its end, is left to the model.
        """
        config = self._config
        longest = min(config.prefix_max, document.stop - document.start - 2)
        draw = random.Random(seed_from(config.decode.seed, "prefix", document.id))
        length = draw.randint(config.prefix_min, longest)
        tokens = self._shards[document.sequence].tokens
        return tokens[document.start : document.start + 1 + length].tolist()

    def _suitable(self) -> Iterator[DocumentSpan]:
        order = list(range(len(self._shards)))
        random.Random(self._config.decode.seed).shuffle(order)
        languages = self._manifest["languages"]
        for index in order:
            sequence = self._shards[index]
            for span, id in zip(sequence.spans, sequence.ids):
                start = int(span["start"])
                stop = int(span["stop"])
                whole = span["mode"] == PLAIN and span["offset"] == 0
                if whole and stop - start >= self._config.prefix_min + 2:
                    yield DocumentSpan(
                        id, languages[span["language"]], index, start, stop
                    )


KIND = "own_text"
UNITS = "units"  # the folder of the records, which are removed at the end
SHARD_DOCUMENTS = 4096


def write_own_text(config: RegenerateConfig) -> None:
    """Continue the documents, unless the folder already holds the result."""
    workers = init_workers()
    out = Path(config.out)
    if config.threads:
        torch.set_num_threads(config.threads)
    config = replace(config, dtype=workers.agreed(choose_dtype(config.dtype)))
    source = Source(config)
    inputs = {"model": config.model, "data.path": config.data.path}
    settings = made_from(config, inputs, ignore=("threads",))
    if is_finished(out, KIND, settings):
        _tell(workers, f"{out} is finished: nothing to do")
    else:
        source.check_tokenizer(ModelDirectory(config.model).text)
        documents = source.documents()
        parts = [
            documents[at : at + config.batch]
            for at in range(0, len(documents), config.batch)
        ]
        names = [f"{index:06}" for index in range(len(parts))]
        with result_folder(out, settings, workers) as partial:
            units = Records(partial / UNITS, names)
            _continue(config, source, dict(zip(names, parts)), units, workers)
            workers.wait()
            if workers.first:
                facts = _finish(partial, units, names)
                write_manifest(partial, KIND, settings, **facts)
                _tell(
                    workers,
                    f"{facts['documents']} documents, {facts['tokens']} new tokens",
                )
    if workers.first:  # also what a run that was killed right at its end has left
        shutil.rmtree(out / UNITS, ignore_errors=True)


def _continue(
    config: RegenerateConfig,
    source: Source,
    parts: dict[str, Any],
    units: Records,
    workers: WorkerGroup,
) -> None:
    """Do this rank's share of the units that are not done; `parts` are the documents of each."""
    names = units.open(workers)
    if not names:
        return
    model = load(config.model, config.dtype, workers.device())
    tokens = 0
    forwards = 0
    began = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
    )
    rate = TextColumn("{task.fields[rate]}")
    with Progress(
        *columns, rate, TimeRemainingColumn(), disable=not workers.first
    ) as progress:
        title = (
            "documents"
            if workers.world == 1
            else f"documents, 1 of {workers.world} ranks"
        )
        task = progress.add_task(
            title, total=sum(len(parts[name]) for name in names), rate=""
        )
        for name in names:
            unit = regenerate(model, source, parts[name], config)
            units.save(name, unit)
            tokens = tokens + unit["tokens"]
            forwards = forwards + unit["forwards"]
            figures = f"{tokens / (time.perf_counter() - began):,.0f} tok/s {tokens / forwards:.1f} tok/forward"
            progress.update(task, advance=len(parts[name]), rate=figures)


def regenerate(
    model: Model,
    source: Source,
    documents: Sequence[DocumentSpan],
    config: RegenerateConfig,
) -> dict[str, Any]:
    """Continue documents side by side: their rows for a shard, and what they took."""
    began = time.perf_counter()
    prompts = [source.prompt(document) for document in documents]
    texts, forwards = _decoded(
        model, prompts, [document.id for document in documents], config
    )
    return {
        "rows": [
            {
                "id": document.id,
                "language": document.language,
                **content(model.text, prompt, new),
            }
            for document, prompt, new in zip(documents, prompts, texts, strict=True)
        ],
        "tokens": sum(map(len, texts)),
        "forwards": forwards,
        "seconds": time.perf_counter() - began,
    }


def content(text: Text, prompt: Sequence[int], new: Iterable[int]) -> dict[str, Any]:
    """Return the text of a prompt and its continuation, and how many of its characters are the prompt's.

    Half of a character that the last token leaves is no text.
    """
    stream = text.stream(opens=True)
    prefix = "".join(map(stream, prompt))
    return {"content": prefix + "".join(map(stream, new)), "prefix": len(prefix)}


def _decoded(
    model: Model,
    prompts: Sequence[list[int]],
    ids: Sequence[str],
    config: RegenerateConfig,
) -> tuple[list[list[int]], int]:
    settings = config.decode
    longest = max(map(len, prompts))
    capacity = longest + settings.max_new_tokens
    if capacity > model.context:
        raise UserError(
            f"decode.max_new_tokens must be at most {model.context - longest} for a prefix of {longest - 1} "
            f"tokens in the model's context of {model.context}, got {settings.max_new_tokens}. Lower it or "
            "prefix_max"
        )
    requests = [
        Request(
            prompt,
            seed_from(settings.seed, id),
            library_processors(
                settings, prompt=len(prompt), ends=model.eos, device=model.lm.device
            ),
        )
        for prompt, id in zip(prompts, ids, strict=True)
    ]
    texts: list[list[int]] = [[] for _ in prompts]
    forwards = 0
    with enough_memory("Lower batch"):
        drafters = model.methods.drafters(
            settings,
            batch=len(prompts),
            capacity=capacity,
            left=model.context - longest,
        )
        runner = model.runners.take(
            batch=len(prompts), capacity=capacity, max_rows=drafters.max_rows
        )
        limits = Limits(settings.max_new_tokens, model.eos)
        for steps in decode(runner, requests, drafters, limits, settings.sampling):
            forwards += 1
            for step in steps:
                texts[step.sequence] += step.tokens
    model.runners.give(runner)
    return texts, forwards


def _finish(partial: Path, units: Records, names: Sequence[str]) -> dict[str, Any]:
    """Write the shards of all units, in the order of their documents; return what the manifest says of them."""
    totals: dict[str, Any] = {"tokens": 0, "forwards": 0, "seconds": 0.0}

    def lines() -> Iterator[bytes]:
        for name in names:
            unit = units.load(name)
            for fact in totals:
                totals[fact] += unit[fact]
            yield from (
                json.dumps(row, ensure_ascii=False).encode() + b"\n"
                for row in unit["rows"]
            )

    shards: list[dict[str, Any]] = []
    left = lines()
    while part := list(islice(left, SHARD_DOCUMENTS)):
        written = b"".join(part)
        write_bytes(partial / f"own-{len(shards):05}.jsonl", written)
        shards.append(
            {"documents": len(part), "sha256": hashlib.sha256(written).hexdigest()}
        )
    return {
        "documents": sum(shard["documents"] for shard in shards),
        **totals,
        "shards": shards,
    }


def _tell(workers: WorkerGroup, line: str) -> None:
    if workers.first:
        print_line(f"regenerate: {line}")
