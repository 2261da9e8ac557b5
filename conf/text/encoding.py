"""Encode text so that no text becomes a control id; training documents and prompts share these rules.

enc(s) includes the implicit leading space of SentencePiece, inf(s) does not. If the tokenizer adds no such
space (byte-level BPE without add_prefix_space), they are equal. (SDSAT §3.1; Code Llama §2.3.)

A BPE tokenizer without a pre-tokenizer (CodeLlama's) merges over the whole text, but no merge crosses a
position that no piece of the vocabulary spans. In CodeLlama's vocabulary no piece has a space after another
character, and no piece spans a line end. So a text can be split into words, each with its leading spaces, and
the words can be encoded separately.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers

from conf.errors import UserError
from conf.text.infilling import CONTROL

SPACE = "▁"  # a space in SentencePiece's vocabulary
WORD = re.compile(r" *[^ \n]+| +|\n")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # pieces of single bytes, which no merge produces


class TextEncoder:
    """Encode texts by a tokenizer of the `tokenizers` library, never to a control id.

    Texts become neither ids of `control` nor ids from `rows` on, which have no embedding in the model. `pieces`
    maps every id below `rows` to its piece.
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
        if (
            whole
        ):  # Transformers 5 writes Llama's implicit space this way; it splits nothing
            self.implicit_space = splitter["prepend_scheme"] != "never"
            tokenizer.pre_tokenizer = None
        if whole or self.implicit_space:
            tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        # Byte-level BPE adds the space only before a text without one.
        byte_levels = [
            step for step in _steps(splitter) if step.get("add_prefix_space")
        ]
        self._adds_second_space = self.implicit_space
        if byte_levels:
            self.implicit_space = True
            for step in byte_levels:
                step["add_prefix_space"] = False
            plain = Tokenizer.from_str(json.dumps(described))
            tokenizer.pre_tokenizer = plain.pre_tokenizer
        # Encode a text that spells a special piece as text. The infilling pieces of DeepSeek-Coder and Qwen
        # are not marked as special in tokenizer.json, so mark them here.
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
        # Control pieces are matched with and without a leading space: "a <PRE>" and "a<PRE>".
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
            and splits_into_words(described["model"]["vocab"])
        )

    def lead(self, text: str) -> str:
        """Return the text with the implicit leading space, if the tokenizer adds it."""
        spaced = text.startswith(" ") and not self._adds_second_space
        return " " + text if self.implicit_space and text and not spaced else text

    def inf(self, text: str) -> list[int]:
        """Encode a text without the implicit leading space, never to a control id."""
        units = WORD.findall(text) if self.by_words else [text] if text else []
        return list(chain.from_iterable(map(self.encode_unit, units)))

    def encode_unit(self, text: str) -> list[int]:
        """Encode a text that needs no further splitting: a word if `by_words`, else any text."""
        ids = self._encode(text)
        return ids if self.control.isdisjoint(ids) else self.defuse(text)

    def has_control(self, ids: Sequence[int]) -> bool:
        """Return whether the ids contain a control id."""
        return not self.control.isdisjoint(ids)

    def defuse(self, text: str) -> list[int]:
        """Encode a text that spells a control piece.

        The text is cut in the middle of each spelling, because CodeLlama's merges lead from " <PRE>" to its
        control id. A control piece of one character is encoded as its bytes instead.
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
        if SPACE not in text:  # faster than calling the whole tokenizer
            return [
                token.id for token in self._model.tokenize(text.replace(" ", SPACE))
            ]
        # A literal "▁" in the text would be read as a space, so encode it as its bytes.
        first, *others = map(self._encode, text.split(SPACE))
        return [
            *first,
            *chain.from_iterable([*self._bytes(SPACE), *ids] for ids in others),
        ]

    def _bytes(self, text: str) -> list[int]:
        """Return the ids of a text's byte pieces. Raises UserError if the tokenizer has no byte pieces."""
        ids = [self.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        if None in ids:
            raise UserError(
                f"tokenizer must spell {text!r} within the model's rows and without control ids, got no byte "
                "pieces for it. Use the tokenizer.json that belongs to the model"
            )
        return ids  # type: ignore[return-value]


def _steps(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a described pre-tokenizer that is a sequence, else its only step."""
    return list(described.get("pretokenizers", [described]))


def prefix_ids(tokenizer: Tokenizer, config: Mapping[str, Any]) -> list[int]:
    """Return the ids that the tokenizer adds before a text: BOS, or nothing.

    `config` is tokenizer_config.json. It is read because DeepSeek-Coder's tokenizer.json adds no BOS, but
    `add_bos_token` makes its tokenizer class add it.
    """
    ids = _before(tokenizer, "a")
    bos = config.get("bos_token") if config.get("add_bos_token") else None
    piece = bos.get("content") if isinstance(bos, Mapping) else bos
    if ids or not isinstance(piece, str):
        return ids
    id = tokenizer.token_to_id(piece)
    return [] if id is None else [id]


def _before(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids that the tokenizer puts before a text. Other ids, such as EOS, follow it."""
    whole = tokenizer.encode(text).ids
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[:start])
    return list(tokenizer.encode("").ids)


def splits_into_words(pieces: Iterable[str]) -> bool:
    """Return whether encoding word by word gives the same ids as encoding whole texts.

    `pieces` is the vocabulary, with "▁" as a space.
    """
    spelled = (
        piece.replace(SPACE, " ") for piece in pieces if not BYTE.fullmatch(piece)
    )
    return all(len(WORD.findall(text)) <= 1 for text in spelled)
