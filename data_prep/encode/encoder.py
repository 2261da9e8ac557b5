"""Text to ids, so that no text becomes a control id and every text can be had back. Knows no layout."""

import json
import re
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
from tokenizers import Tokenizer, normalizers

from conf import UserError
from conf.errors import TOKENIZING
from data_prep.encode.words import Ragged, WordCache, falls_into_words
from data_prep.vocab import Vocab

SPACE = "▁"  # how SentencePiece spells a space
PROBE = "  x = 1\n\tif e\u0301: ▁ 漢😀\r\n "


class Encoder:
    """Text to ids by a `tokenizers` file, in CodeLlama's two ways.

    enc(s) has the implicit leading space of SentencePiece, inf(s) has not; where the
    tokenizer adds no such space (byte-level BPE) they are the same.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: Vocab) -> None:
        described = json.loads(tokenizer.to_str())
        normalizer = described["normalizer"] or {}
        steps = normalizer.get("normalizers", [normalizer])
        self.implicit_space = any(step.get("type") == "Prepend" for step in steps)
        if self.implicit_space:
            tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        # Source text that spells a special piece is text: it must never become a control id.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._model = tokenizer, tokenizer.model
        # A piece that the model has no embedding row for is as much out of reach as a control piece.
        beyond = {id for id in tokenizer.get_vocab(with_added_tokens=True).values() if id >= vocab.size}
        self.control = vocab.control | beyond
        pieces = [piece for id in self.control if (piece := tokenizer.id_to_token(id)) is not None]
        # Spelled with the space before them or not: "a<PRE>" is no more innocent than "a <PRE>".
        spellings = {piece.lstrip(SPACE) or piece for piece in pieces}
        self._spelled = re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))
        self._spellings = sorted(s for s in spellings if not any(o in s for o in spellings - {s}))
        # Its own pre-tokenizer cuts, and the library caches, where there is one.
        bpe = described["model"]["type"] == "BPE" and not described["pre_tokenizer"]
        by_words = bpe and self.implicit_space and falls_into_words(described["model"]["vocab"])
        self._encode_one = self._by_model if by_words else self._by_tokenizer
        self._encode = WordCache(self._encode_word) if by_words else self._encode_whole

    def lead(self, text: str) -> str:
        """The text whose plain encoding is enc(text)."""
        return " " + text if self.implicit_space and text else text

    def spells_control(self, text: str) -> bool:
        """Whether a control piece is spelled in the text, which a careless encoder would make its id."""
        return any(spelling in text for spelling in self._spellings)

    @TOKENIZING
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Plain encodings (inf) of many texts at once, never with a control id."""
        ids, lengths = self._encode(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(texts) else []

    def check(self) -> None:
        """Raises UserError for a tokenizer that loses text, or cannot spell a control piece as text."""
        by_id = dict[int, str]()
        for piece, id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if id in by_id:  # it would be decoded as the other
                pieces = sorted((piece, by_id[id]))
                raise UserError(f"tokenizer: wanted an id for each piece, found {id} for both of {pieces}")
            by_id[id] = piece
        for text in (PROBE, " ".join(["", *self._spellings, ""])):
            back = self.decode(self.encode([text])[0])
            if back != text:
                raise UserError(
                    f"tokenizer: wanted one that gives every text back, found {back!r} for {text!r}"
                )

    def _encode_whole(self, texts: Sequence[str]) -> Ragged:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [
            self._defuse(text) if self._has_control(encoding.ids) else encoding.ids
            for text, encoding in zip(texts, encoded, strict=True)
        ]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.int32, lengths.sum()), lengths

    def _encode_word(self, word: str) -> list[int]:
        ids = self._by_model(word)
        return self._defuse(word) if self._has_control(ids) else ids

    def _by_tokenizer(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _by_model(self, text: str) -> list[int]:
        """Without the tokenizer's overhead; a "▁" of the text, which would be a space, by its bytes."""
        if SPACE not in text:
            return [token.id for token in self._model.tokenize(text.replace(" ", SPACE))]
        first, *others = text.split(SPACE)
        ids = self._by_model(first) if first else []
        for part in others:
            ids += self._bytes(SPACE) + (self._by_model(part) if part else [])
        return ids

    def _has_control(self, ids: Sequence[int]) -> bool:
        return not self.control.isdisjoint(ids)

    def _defuse(self, text: str) -> list[int]:
        """Encode a text that spells a control piece: cut in the middle of each spelling, since in
        CodeLlama's tokenizer the merges themselves lead from " <PRE>" to its control id. A piece of
        one character cannot be cut: its bytes stand for it.
        """
        middles = [m.start() + len(m.group()) // 2 for m in self._spelled.finditer(text)]
        parts = [text[start:stop] for start, stop in pairwise([0, *middles, len(text)]) if start < stop]
        ids: list[int] = []
        for id in chain.from_iterable(map(self._encode_one, parts)):
            spelled = (self._tokenizer.id_to_token(id) or "").replace(SPACE, " ")
            ids += self._bytes(spelled) if id in self.control else [id]
        assert not self._has_control(ids), "a text still yields a control id"
        return ids

    def _bytes(self, text: str) -> list[int]:
        """The byte pieces that spell a text. Raises UserError where there are none."""
        ids = [self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        if None in ids:
            raise UserError(
                f"tokenizer: wanted byte pieces, or control ids that no text can spell, found {text!r}"
            )
        return ids  # type: ignore[return-value]

    @TOKENIZING
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The exact text of ids without control pieces, the inverse of inf()."""
        listed = np.asarray(ids).tolist()
        if not self.implicit_space:
            return self._tokenizer.decode(listed, skip_special_tokens=False)
        # The tokenizer's own decoder strips a leading space: shield it with a piece of text.
        shield = self._tokenizer.encode("\n", add_special_tokens=False).ids
        return self._tokenizer.decode(shield + listed, skip_special_tokens=False)[1:]
