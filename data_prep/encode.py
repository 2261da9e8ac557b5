"""Encode documents, either plain or laid out for infilling at character level.

    PLAIN   BOS enc(text)
    PSM     BOS PRE enc(prefix) SUF inf(suffix) MID inf(middle) EOT
    SPM     BOS PRE SUF inf(suffix) MID enc(prefix + middle) EOT

EOS follows at the end of a document. BOS is left out if the tokenizer does not add it. A
tokenizer without EOT has EOS after every middle. conf.text.infilling lists the formats of the
families of models. In SPM, prefix and middle are encoded as one text. conf.text.encoding defines
enc and inf; no text becomes a control id. (SDSAT §3.1; Code Llama §2.3.)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import chain
from unicodedata import normalize

import numpy as np
from tokenizers import Tokenizer

from conf.errors import TOKENIZER_ERRORS, UserError
from conf.text.encoding import WORD, TextEncoder
from conf.text.infilling import ORDERS, PSM, SPM, Segment
from data_prep.config import DataPrepConfig
from data_prep.document import Document, batches, generator
from data_prep.vocab import Vocab

SAMPLE = (
    "  x = 1\n\tif e\u0301: ▁ 漢😀\r\n "  # text that a tokenizer must decode exactly
)
CACHE_CHARS = 32_000_000  # size of the word cache in characters
WORD_CHARS = 24  # overhead of a cached word in characters

# Concatenated ids of several texts, and the number of ids of each text.
Ragged = tuple[np.ndarray, np.ndarray]


class Mode(IntEnum):
    """How a document is laid out: plain, for infilling, or as a chat. Shards store the value."""

    PLAIN = 0
    PSM = 1
    SPM = 2
    CHAT = 3  # by the tokenizer's chat template


def choose_mode(
    generator: np.random.Generator,
    *,
    fim_rate: float,
    spm_rate: float,
    orders: Sequence[str] = ORDERS,
) -> Mode:
    """Draw PLAIN with probability 1 - fim_rate, else SPM with probability spm_rate, else PSM.

    If the family has only one of the `orders`, all infilling documents have that order.
    """
    fim, spm = generator.random(2)
    if fim >= fim_rate:
        return Mode.PLAIN
    if PSM not in orders or (SPM in orders and spm < spm_rate):
        return Mode.SPM
    return Mode.PSM


def choose_cuts(generator: np.random.Generator, length: int) -> tuple[int, int]:
    """Draw two cut points, uniform over the positions 0 to `length`, in ascending order."""
    first, second = sorted(generator.integers(0, length + 1, size=2).tolist())
    return first, second


def document_segments(
    text: str,
    mode: Mode,
    cuts: tuple[int, int],
    *,
    vocab: Vocab,
    lead: Callable[[str], str],
    ends: bool = True,
) -> list[Segment]:
    """Return the control ids and texts of a document; `lead(s)` returns t with inf(t) = enc(s)."""
    bos = [vocab.bos] if vocab.bos is not None else []
    eos = [vocab.eos] if ends else []
    if mode is Mode.PLAIN:
        return [*bos, lead(text), *eos]
    infilling = vocab.fim
    assert infilling is not None
    segments = infilling.segments(
        PSM if mode is Mode.PSM else SPM,
        prefix=text[: cuts[0]],
        suffix=text[cuts[1] :],
        middle=text[cuts[0] : cuts[1]],
        lead=lead,
    )
    # A middle always has its end, even in a piece without the document's end.
    end = [vocab.eos] if infilling.eot is None else [infilling.eot, *eos]
    return [*bos, *segments, *end]


def encode(
    documents: Iterable[Document], config: DataPrepConfig, encoder: "Encoder"
) -> Iterator[tuple[Document, Mode, np.ndarray]]:
    """Yield each document with its mode and (n,) int32 ids.

    A document that is too long for infilling stays plain. Conversations have been encoded
    before.
    """

    def segments(document: Document, mode: Mode) -> list[Segment]:
        random = generator(config.seed, "cuts", document.id)
        return document_segments(
            document.text,
            mode,
            choose_cuts(random, len(document.text)),
            vocab=encoder.vocab,
            lead=encoder.lead,
            ends=document.ends,
        )

    infilling = encoder.vocab.fim
    fim_rate = config.fim_rate if infilling else 0
    orders = infilling.orders if infilling else ORDERS
    for batch in batches(documents):
        if batch[0].turns:  # then all documents are conversations
            for document in batch:
                yield document, Mode.CHAT, np.array(document.turns[0].ids, np.int32)
            continue
        modes = [
            choose_mode(
                generator(config.seed, "mode", document.id),
                fim_rate=fim_rate,
                spm_rate=config.spm_rate,
                orders=orders,
            )
            for document in batch
        ]
        laid_out = list(map(segments, batch, modes))
        encoded = _encode_segments(laid_out, encoder)
        for document, mode, ids in zip(batch, modes, encoded, strict=True):
            if mode is not Mode.PLAIN and len(ids) > config.seq_len:
                mode = Mode.PLAIN
                (ids,) = _encode_segments([segments(document, mode)], encoder)
            yield document, mode, ids


def _encode_segments(
    laid_out: list[list[Segment]], encoder: "Encoder"
) -> list[np.ndarray]:
    """Encode the texts of several documents in one call, and insert the control ids."""
    texts = [part for parts in laid_out for part in parts if isinstance(part, str)]
    encoded = iter(encoder.encode(texts))
    return [
        np.concatenate(
            [next(encoded) if isinstance(part, str) else [part] for part in parts]
        ).astype(np.int32)
        for parts in laid_out
    ]


class Encoder(TextEncoder):
    """Encode batches of texts, and decode ids."""

    def __init__(self, tokenizer: Tokenizer, vocab: Vocab) -> None:
        super().__init__(tokenizer, control=vocab.control, rows=vocab.size)
        self.vocab = vocab
        # With a pre-tokenizer the library itself splits texts into words and caches them.
        self._encode_all = (
            WordCache(self.encode_unit) if self.by_words else self._encode_whole
        )

    def spells_control(self, text: str) -> bool:
        """Return True if the text spells a control piece."""
        return any(spelling in text for spelling in self.spellings)

    @TOKENIZER_ERRORS
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) int32, without an implicit leading space or BOS."""
        ids, lengths = self._encode_all(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(texts) else []

    def _encode_whole(self, texts: Sequence[str]) -> Ragged:
        encoded = self.tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return _ragged(
            [
                self.defuse(text) if self.has_control(encoding.ids) else encoding.ids
                for text, encoding in zip(texts, encoded, strict=True)
            ]
        )

    @TOKENIZER_ERRORS
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the exact text of ids without control ids; the inverse of inf."""
        listed = np.asarray(ids).tolist()
        if not self.implicit_space:
            return self.tokenizer.decode(listed, skip_special_tokens=False)
        # The decoder strips a leading space, so decode with a newline before it.
        newline = self.tokenizer.encode("\n", add_special_tokens=False).ids
        return self.tokenizer.decode(newline + listed, skip_special_tokens=False)[1:]

    def check(self) -> None:
        """Raise UserError if the tokenizer does not decode texts to the original.

        Texts are compared in Unicode normal form NFC, since Qwen's tokenizers normalize to it.
        """
        pieces = self.tokenizer.get_vocab(with_added_tokens=True)
        shared_id = len(set(pieces.values())) < len(pieces)
        texts = (SAMPLE, " ".join(["", *self.spellings, ""]))
        lossy = [
            text
            for text in texts
            if normalize("NFC", self.decode(*self.encode([text])))
            != normalize("NFC", text)
        ]
        if shared_id or lossy:
            raise UserError(
                "tokenizer must have a different id for each piece and decode every text "
                f"exactly, got {lossy or 'one id for two pieces'}. Use the tokenizer.json "
                "that belongs to the model"
            )


def _ragged(lists: Sequence[Sequence[int]]) -> Ragged:
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.fromiter(chain.from_iterable(lists), np.int32, lengths.sum()), lengths


class WordCache:
    """Encode texts word by word, and call `encode` only for new words.

    Most words of source code repeat, so this is several times as fast as the tokenizer.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._forget()

    def _forget(self) -> None:
        self._index = _Index(self._encode)
        self._ids = np.empty(0, dtype=np.int32)
        self._starts = np.empty(0, dtype=np.int64)
        self._lengths = np.empty(0, dtype=np.int64)

    def __call__(self, texts: Sequence[str]) -> Ragged:
        """Return the ids of the texts."""
        if self._index.chars > CACHE_CHARS:
            self._forget()
        words = [WORD.findall(text) for text in texts]
        count = sum(map(len, words))
        index = np.fromiter(
            map(self._index.__getitem__, chain.from_iterable(words)), np.int64, count
        )
        self._append_new()
        lengths = self._lengths[index]
        ends = np.cumsum(np.append(0, lengths))
        positions = np.arange(ends[-1]) + np.repeat(
            self._starts[index] - ends[:-1], lengths
        )
        per_text = np.cumsum([0, *map(len, words)])
        return self._ids[positions], np.diff(ends[per_text])

    def _append_new(self) -> None:
        """Append the ids of the words that were new to the index."""
        new = self._index.new
        self._index.new = []
        if new:
            ids, lengths = _ragged(new)
            self._starts = np.concatenate(
                [self._starts, len(self._ids) + np.cumsum(lengths) - lengths]
            )
            self._lengths = np.concatenate([self._lengths, lengths])
            self._ids = np.concatenate([self._ids, ids])


class _Index(dict[str, int]):
    """Map words to consecutive numbers; a new word is encoded and gets the next number."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._encode = encode
        self.new: list[Sequence[int]] = []
        self.chars = 0

    def __missing__(self, word: str) -> int:
        self.new.append(self._encode(word))
        self.chars += len(word) + WORD_CHARS
        self[word] = number = len(self)
        return number
