"""Which documents of a finished data folder are continued, and from where.

The training split alone: what validation is measured on must not be trained on. A document is read as its token
ids, so that the model continues what training showed it. Those that are laid out for infilling, and the rest of
one that was cut at a sequence's end, are left out.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from conf import UserError
from conf.stage import read_manifest
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from infer.engine.sampling import seed_from
from infer.regenerate.config import RegenerateConfig
from infer.text import Text

PLAIN = 0  # the mode of a span that is not laid out for infilling


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the training split, by its place in the shards: tokens start:stop of a sequence."""

    id: str
    language: str
    sequence: int
    start: int
    stop: int


class Source:
    """The training documents of the folder `data.path`, in an order that decode.seed decides.

    Raises UserError for what is no finished data folder.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        self._config, self._path = config, config.data.path
        self._manifest = read_manifest(self._path, "shards", "data.path")
        self._shards = Shards(self._path, "train")

    def check_tokenizer(self, text: Text) -> None:
        """Raises UserError where an id of the shards is another piece to the model."""
        pieces = load_tokenizer(Path(self._path) / TOKENIZER).get_vocab(with_added_tokens=True)
        size = Vocab.from_json(self._manifest["vocab"]).text_size
        differing = sorted(id for piece, id in pieces.items() if id < size and text.pieces.get(id) != piece)
        if differing:
            raise UserError(
                f"data.path={self._path} must be prepared with the tokenizer of model={self._config.model}, "
                f"got another piece for id {differing[0]}. Prepare the data with "
                f"tokenizer={self._config.model}"
            )

    def documents(self) -> list[Document]:
        """Those to continue, in order. Raises UserError for fewer than `documents`."""
        config = self._config
        drawn = list(islice(self._suitable(), config.documents))
        if len(drawn) < (config.documents or 1):
            raise UserError(
                f"documents must be at most {len(drawn)}, got {config.documents or 'all'}: data.path="
                f"{self._path} has no more training documents in plain layout that are longer than "
                f"prefix_min={config.prefix_min} tokens. Lower documents or prefix_min"
            )
        return drawn

    def prompt(self, document: Document) -> list[int]:
        """The ids of what opens the document and of its prefix, whose length its id and decode.seed decide.

        At least one token of the document, which may be its end, is left to the model.
        """
        config = self._config
        longest = min(config.prefix_max, document.stop - document.start - 2)
        draw = random.Random(seed_from(config.decode.seed, "prefix", document.id))
        length = draw.randint(config.prefix_min, longest)
        tokens = self._shards[document.sequence].tokens
        return tokens[document.start : document.start + 1 + length].tolist()

    def _suitable(self) -> Iterator[Document]:
        order = list(range(len(self._shards)))
        random.Random(self._config.decode.seed).shuffle(order)
        languages = self._manifest["languages"]
        for index in order:
            sequence = self._shards[index]
            for span, id in zip(sequence.spans, sequence.ids):
                start, stop = int(span["start"]), int(span["stop"])
                whole = span["mode"] == PLAIN and span["offset"] == 0
                if whole and stop - start >= self._config.prefix_min + 2:
                    yield Document(id, languages[span["language"]], index, start, stop)
