"""python -m infer.regenerate: continue training documents with the model's own text.

    OUT/own-00000.jsonl   id, language, content, prefix: the first `prefix` characters
                          of `content` are the document's own, the rest is the model's
    OUT/manifest.json     written last

`python -m data_prep experiment=own` prepares these shards for `data.own` of training.
Under torchrun the documents are divided over the ranks in batches, each of which is
saved as soon as it is done. Neither the number of ranks nor a kill changes a byte.

Only documents of the training split are continued, because validation must not be
trained on. Infilling documents and the rests of documents that were cut are left out.
"""

import json
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf import UserError, run
from conf.console import print_line
from conf.files import write_bytes
from conf.schema import check_settings, setting
from conf.stage import is_finished, made_from, read_manifest, write_manifest
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from infer.config import DTYPES, DecodeConfig, check_directory
from infer.engine.sampling import seed_from

if TYPE_CHECKING:
    from infer.api import Model
    from infer.bench.harness import WorkerGroup
    from infer.text import Text

KIND = "own_text"
PLAIN = 0  # data_prep.encode.Mode.PLAIN: a span that is not laid out for infilling
UNITS = "units"  # the folder of finished batches; removed at the end
SHARD_DOCUMENTS = 4096


@dataclass
class DocumentsConfig:
    """The documents to continue."""

    #: a finished folder of data_prep, with the model's tokenizer
    path: str = setting()


@dataclass
class RegenerateConfig:
    """python -m infer.regenerate: training documents, continued by the model.

    The text of a document depends on the seed and its id, not on its batch.
    """

    #: a Transformers directory or hub name, with or without adaptive tokens
    model: str = setting(hub="model")
    data: DocumentsConfig = field(default_factory=DocumentsConfig)
    #: the folder to write
    out: str = setting()
    #: tokens to add to a prefix, at most
    max_new_tokens: int = setting(256, least=1)
    #: of sampling; 0: the likeliest token
    temperature: float = setting(0.0, least=0)
    #: draws the documents, their prefixes and the noise of sampling
    seed: int = setting(0, least=0)
    #: the most documents to continue, drawn by the seed; null: all
    documents: int | None = setting(None, least=1)
    #: the shortest prefix of a document, in tokens
    prefix_min: int = setting(16, least=1)
    #: the longest prefix of a document, in tokens; each length is as likely
    prefix_max: int = setting(64, least=1)
    #: documents that are decoded side by side and saved together
    batch: int = setting(64, least=1)
    #: of the weights; auto: bfloat16 where the device computes in it as fast
    dtype: str = setting("auto", choices=DTYPES)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.prefix_max < self.prefix_min:
            raise ValueError(
                f"prefix_max must be at least prefix_min={self.prefix_min}, "
                f"got {self.prefix_max}. Raise it."
            )

    @property
    def decode(self) -> DecodeConfig:
        """How a prefix is continued: without drafts, many documents side by side."""
        return DecodeConfig(
            "plain",
            temperature=self.temperature,
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
        self._manifest = read_manifest(config.data.path, "shards", "data.path")
        self._shards = Shards(config.data.path, "train")

    def check_tokenizer(self, text: "Text") -> None:
        """Raise UserError if the model has another piece for an id of the shards."""
        path = self._config.data.path
        tokenizer = load_tokenizer(Path(path) / TOKENIZER)
        size = Vocab.from_json(self._manifest["vocab"]).text_size
        for piece, id in tokenizer.get_vocab(with_added_tokens=True).items():
            if id < size and text.pieces.get(id) != piece:
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
                f"data.path={self._config.data.path} must have training documents in "
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
        longest = min(config.prefix_max, document.stop - document.start - 2)
        rng = random.Random(seed_from(config.seed, "prefix", document.id))
        length = rng.randint(config.prefix_min, longest)
        tokens = self._shards[document.sequence].tokens
        return tokens[document.start : document.start + 1 + length].tolist()

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


def main(config: RegenerateConfig) -> None:
    """Continue the documents, unless the folder already holds the result."""
    check_directory(config.model)
    # Imported late: a mistake in the settings is reported without loading PyTorch.
    from conf.dtype import choose_dtype
    from infer.bench.harness import init_workers

    workers = init_workers()
    config = replace(config, dtype=workers.agreed(choose_dtype(config.dtype)))
    source = TrainingDocuments(config)
    inputs = {"model": config.model, "data.path": config.data.path}
    origin = made_from(config, inputs)
    if is_finished(config.out, KIND, origin):
        line = f"{config.out} is finished: nothing to do"
    else:
        line = f"{write_own_text(config, source, origin, workers)} documents"
    if workers.first:
        print_line(f"regenerate: {line}")


def write_own_text(
    config: RegenerateConfig,
    source: TrainingDocuments,
    origin: dict[str, Any],
    workers: "WorkerGroup",
) -> int:
    """Write `out`, together with the other ranks; return the number of documents."""
    from infer.api import load
    from infer.bench.harness import Records, result_folder
    from infer.models.checkpoint import ModelDirectory

    source.check_tokenizer(ModelDirectory(config.model).text)
    documents = source.drawn()
    batches = {
        f"{start:08}": documents[start : start + config.batch]
        for start in range(0, len(documents), config.batch)
    }
    with result_folder(config.out, origin, workers) as partial:
        units = Records(partial / UNITS, list(batches))
        model = load(config.model, config.dtype, workers.device())

        def unit(name: str) -> dict[str, Any]:
            return {"rows": continue_documents(model, source, batches[name], config)}

        units.make(workers, "batches of documents", unit)
        if workers.first:
            write_shards(partial, (units.load(name)["rows"] for name in batches))
            write_manifest(partial, KIND, origin, documents=len(documents))
            shutil.rmtree(partial / UNITS)
    return len(documents)


def continue_documents(
    model: "Model",
    source: TrainingDocuments,
    documents: Sequence[DocumentSpan],
    config: RegenerateConfig,
) -> list[dict[str, Any]]:
    """Continue documents side by side; return their rows of a shard."""
    from infer.api import generate

    prompts = [source.prompt(document) for document in documents]
    seeds = [seed_from(config.seed, document.id) for document in documents]
    texts: list[list[int]] = [[] for _ in documents]
    for step in generate(model, prompts, config.decode, seeds=seeds):
        texts[step.sequence] += step.tokens
    return [
        {
            "id": document.id,
            "language": document.language,
            **content(model.text, prompt, text),
        }
        for document, prompt, text in zip(documents, prompts, texts, strict=True)
    ]


def content(
    text: "Text", prompt: Sequence[int], new: Sequence[int]
) -> dict[str, str | int]:
    """Return the text of a prompt and its continuation, and the prompt's length.

    The length is in characters. Half a character at the end is left out.
    """
    stream = text.stream(opens=True)
    prefix = "".join(map(stream, prompt))
    return {"content": prefix + "".join(map(stream, new)), "prefix": len(prefix)}


def write_shards(folder: Path, batches: Iterable[list[dict[str, Any]]]) -> None:
    """Write the rows of all batches, in their order."""
    lines = (
        json.dumps(row, ensure_ascii=False).encode() + b"\n"
        for rows in batches
        for row in rows
    )
    for index in count():
        shard = b"".join(islice(lines, SHARD_DOCUMENTS))
        if not shard:
            break
        write_bytes(folder / f"own-{index:05}.jsonl", shard)


if __name__ == "__main__":
    run("regenerate", RegenerateConfig, main)
