"""Text to ids so that no text becomes a control id: the rules that training documents and prompts share.

enc(s) has the implicit leading space of SentencePiece, inf(s) has not; where the tokenizer adds no such space
(byte-level BPE) they are the same. (SDSAT §3.1; Code Llama §2.3.)

A BPE without a pre-tokenizer (CodeLlama's) merges over whole texts, yet no merge can cross a place that no
piece of the vocabulary spans. No piece of CodeLlama's has a space after anything else, or a line end. So a text
falls into words, spaces and what follows them, that can be encoded apart.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers

from conf.errors import UserError
from conf.infilling import CONTROL

SPACE = "▁"  # how SentencePiece spells a space
WORD = re.compile(r" *[^ \n]+| +|\n")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # pieces for single bytes: no merge makes them


class TextEncoder:
    """A `tokenizers` file as training reads it.

    `control` are ids that no text may become; ids from `rows` on, which the model has no embedding for, are as
    much out of reach. `pieces` are all others, by id.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, control: Collection[int], rows: int | None
    ) -> None:
        described = json.loads(tokenizer.to_str())
        normalizer = described["normalizer"] or {}
        steps = normalizer.get("normalizers", [normalizer])
        self.implicit_space = any(step.get("type") == "Prepend" for step in steps)
        splitter = described["pre_tokenizer"] or {}
        whole = splitter.get("type") == "Metaspace" and not splitter["split"]
        if whole:  # Transformers 5's spelling of Llama's rule, which splits nothing
            self.implicit_space = splitter["prepend_scheme"] != "never"
            tokenizer.pre_tokenizer = None
        if whole or self.implicit_space:
            tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        # A text that spells a special piece is text. So is one that spells a control piece which
        # tokenizer.json does not mark as special, as DeepSeek-Coder's and Qwen's for infilling.
        added = tokenizer.get_added_tokens_decoder().items()
        tokenizer.add_special_tokens(
            [
                AddedToken(piece.content, special=True, normalized=False)
                for id, piece in added
                if not piece.special and (id in control or piece.content in CONTROL)
            ]
        )
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self._model = tokenizer.model
        by_id = {
            id: piece
            for piece, id in tokenizer.get_vocab(with_added_tokens=True).items()
        }
        beyond = {id for id in by_id if rows is not None and id >= rows}
        self.control = frozenset(control) | beyond
        self.pieces = {id: piece for id, piece in by_id.items() if id not in beyond}
        # Spelled with the space before them or not: "a<PRE>" is no more innocent than "a <PRE>".
        controls = [by_id[id] for id in self.control if id in by_id]
        spellings = {piece.lstrip(SPACE) or piece for piece in controls}
        self._spelled = re.compile(
            "|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) or "$^"
        )
        self.spellings = sorted(
            s for s in spellings if not any(other in s for other in spellings - {s})
        )
        bpe = described["model"]["type"] == "BPE" and not tokenizer.pre_tokenizer
        self.by_words = (
            bpe
            and self.implicit_space
            and falls_into_words(described["model"]["vocab"])
        )

    def lead(self, text: str) -> str:
        """Return the text whose inf is enc(text)."""
        return " " + text if self.implicit_space and text else text

    def inf(self, text: str) -> list[int]:
        """Encode a text without the implicit space, never to a control id."""
        units = WORD.findall(text) if self.by_words else [text] if text else []
        return list(chain.from_iterable(map(self.encode_unit, units)))

    def encode_unit(self, text: str) -> list[int]:
        """Encode a word where `by_words`, else any text."""
        ids = self._encode(text)
        return ids if self.control.isdisjoint(ids) else self.defuse(text)

    def has_control(self, ids: Sequence[int]) -> bool:
        """Return whether a control id is among the ids."""
        return not self.control.isdisjoint(ids)

    def defuse(self, text: str) -> list[int]:
        """Encode a text that spells a control piece.

        It is cut in the middle of each spelling, since in CodeLlama's tokenizer the merges themselves lead from
        " <PRE>" to its control id. A piece of one character cannot be cut: its bytes stand for it.
        """
        middles = [
            m.start() + len(m.group()) // 2 for m in self._spelled.finditer(text)
        ]
        parts = [
            text[start:stop]
            for start, stop in pairwise([0, *middles, len(text)])
            if start < stop
        ]
        ids: list[int] = []
        for id in chain.from_iterable(map(self._encode, parts)):
            spelled = (self.tokenizer.id_to_token(id) or "").replace(SPACE, " ")
            ids += self._bytes(spelled) if id in self.control else [id]
        assert not self.has_control(ids), "a text still yields a control id"
        return ids

    def _encode(self, text: str) -> list[int]:
        if not self.by_words:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        if SPACE not in text:  # without the tokenizer's overhead
            return [
                token.id for token in self._model.tokenize(text.replace(" ", SPACE))
            ]
        # A "▁" of the text would be a space: its bytes stand for it.
        first, *others = map(self._encode, text.split(SPACE))
        return [
            *first,
            *chain.from_iterable([*self._bytes(SPACE), *ids] for ids in others),
        ]

    def _bytes(self, text: str) -> list[int]:
        """Return the byte pieces that spell a text. Raises UserError where the tokenizer has none."""
        ids = [self.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        if None in ids:
            raise UserError(
                f"tokenizer must spell {text!r} within the model's rows and without control ids, got no byte "
                "pieces for it. Use the tokenizer.json that belongs to the model"
            )
        return ids  # type: ignore[return-value]


def opening(tokenizer: Tokenizer, config: Mapping[str, Any]) -> list[int]:
    """Return the ids that the tokenizer puts before a text.

    `config` is tokenizer_config.json: DeepSeek-Coder's tokenizer.json puts none, and its
    `add_bos_token` says that the tokenizer's class does.
    """
    ids: list[int] = tokenizer.encode("").ids
    bos = config.get("bos_token") if config.get("add_bos_token") else None
    if ids or not bos:
        return ids
    id = tokenizer.token_to_id(bos if isinstance(bos, str) else bos["content"])
    return [] if id is None else [id]


def falls_into_words(pieces: Iterable[str]) -> bool:
    """Return whether texts of a vocabulary (with "▁" as a space) encode word by word to the same ids."""
    spelled = (
        piece.replace(SPACE, " ") for piece in pieces if not BYTE.fullmatch(piece)
    )
    return all(len(WORD.findall(text)) <= 1 for text in spelled)
