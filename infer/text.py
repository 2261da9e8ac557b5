"""Prompts to ids exactly as training encoded its documents, and ids back to text.

    plain   BOS enc(text)
    PSM     BOS PRE enc(prefix) SUF inf(suffix) MID        the model goes on with inf(middle) EOT
    SPM     BOS PRE SUF inf(suffix) MID enc(prefix)        the model goes on with the middle, EOT

enc(s) has the implicit leading space of SentencePiece, inf(s) has not; where the tokenizer adds no
such space they are the same. No text becomes a control id. (SDSAT §3.1; Code Llama §2.3.)

What becomes of one sequence's tokens: text, piece by piece, and the end where a stop string says so.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from tokenizers import Tokenizer, normalizers
from tokenizers.decoders import DecodeStream

from conf import UserError
from conf.errors import TOKENIZING
from infer.config import Infill

SPACE = "▁"  # how SentencePiece spells a space
WORD = re.compile(r" *[^ \n]+| +|\n")  # where no piece crosses their borders, words are encoded apart
BROKEN = "\ufffd"  # what stands for bytes that are no UTF-8
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Infilling:
    """The control ids of infilling."""

    pre: int
    suf: int
    mid: int
    eot: int


class NoInfilling(UserError):
    """Of a model that was not trained for infilling."""


class Text:
    """A `tokenizers` file with what the model directory says of its ids.

    `control` are ids that no text may become; ids from `rows` on, which the model has no embedding
    for, are as much out of reach. `bos` opens every prompt; None is what the tokenizer itself puts there.
    `pieces` are all others, by id.
    """

    @TOKENIZING
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        control: Collection[int] = (),
        rows: int | None = None,
        bos: int | None = None,
        infilling: Infilling | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # A prompt that spells a special piece is text, as it was in training.
        tokenizer.encode_special_tokens = True
        self._bos = tokenizer.encode("").ids if bos is None else [bos]
        if rows is not None and any(id >= rows for id in self._bos):
            raise UserError(
                f"tokenizer: the ids that open a text must be among the model's {rows} rows, got {self._bos}"
            )
        described = json.loads(tokenizer.to_str())
        self._implicit_space = any(step.get("type") == "Prepend" for step in steps_of(described["normalizer"]))
        if self._implicit_space:
            tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        bpe = described["model"]["type"] == "BPE" and not described["pre_tokenizer"]
        self._by_words = bpe and self._implicit_space and falls_into_words(described["model"]["vocab"])
        self._tokenizer, self._infilling = tokenizer, infilling
        known = {id: piece for piece, id in tokenizer.get_vocab(with_added_tokens=True).items()}
        beyond = {id for id in known if rows is not None and id >= rows}
        self.pieces = {id: piece for id, piece in known.items() if id not in beyond}
        self._control = {*control, *beyond}
        pieces = [known[id] for id in self._control if id in known]
        # Spelled with the space before them or not: "a<PRE>" is no more innocent than "a <PRE>".
        spellings = {piece.lstrip(SPACE) or piece for piece in pieces}
        self._spelled = re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) or "$^")

    @TOKENIZING
    def encode(self, text: str) -> list[int]:
        """BOS enc(text)."""
        return [*self._bos, *self._plain(self._lead(text))]

    @TOKENIZING
    def infill(self, prompt: Infill) -> list[int]:
        """Return the prompt whose continuation, up to EOT, is the middle.

        Raises NoInfilling for a model that was not trained for it.
        """
        ids = self._infilling
        if ids is None:
            raise NoInfilling(
                "infill needs a model trained for infilling, got no infilling ids in its adaptive.json"
            )
        prefix, suffix = self._plain(self._lead(prompt.prefix)), self._plain(prompt.suffix)
        if prompt.order == "psm":
            return [*self._bos, ids.pre, *prefix, ids.suf, *suffix, ids.mid]
        return [*self._bos, ids.pre, ids.suf, *suffix, ids.mid, *prefix]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without control pieces: what a stream of these ids gives."""
        with TOKENIZING:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        if BROKEN not in text:
            return text
        # Byte pieces that are no UTF-8 break all byte pieces beside them, which a stream has given by then.
        stream = self.stream(opens=True)
        return "".join(map(stream, ids)) + stream.rest()

    @TOKENIZING
    def stream(self, *, opens: bool) -> "TextStream":
        """For the ids behind a prompt; `opens` where they are the first of a text."""
        return TextStream(self._tokenizer, self._plain("a"), opens=opens)

    def ends(self, prompt: Sequence[int]) -> frozenset[int]:
        """Return the ids that end the text behind a prompt beside EOS: EOT, for infilling."""
        infills = self._infilling is not None and self._infilling.mid in prompt
        return frozenset([self._infilling.eot]) if self._infilling and infills else frozenset()

    def unseen(self, stop: Sequence[str]) -> frozenset[int]:
        """Return the ids of special pieces, which no text shows, that contain a string of `stop`."""
        special = {
            id: piece.content
            for id, piece in self._tokenizer.get_added_tokens_decoder().items()
            if piece.special
        }
        return frozenset(id for id, piece in special.items() if any(string in piece for string in stop))

    def is_empty(self, ids: Sequence[int]) -> bool:
        """Whether this is the prompt of an empty text."""
        return list(ids) == self._bos

    def _lead(self, text: str) -> str:
        """Return the text whose plain encoding is enc(text)."""
        return " " + text if self._implicit_space and text else text

    def _plain(self, text: str) -> list[int]:
        """inf(text). Raises UserError for what no UTF-8 can hold, as an argument in another encoding."""
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError("prompt must be text in UTF-8, got other bytes")
        units = WORD.findall(text) if self._by_words else [text] if text else []
        return list(chain.from_iterable(map(self._unit, units)))

    def _unit(self, unit: str) -> list[int]:
        ids = self._raw(unit)
        return ids if self._control.isdisjoint(ids) else list(self._defused(unit))

    def _raw(self, text: str) -> list[int]:
        if not self._by_words:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # A "▁" of the text would be a space: its bytes stand for it.
        first, *others = (
            [token.id for token in self._tokenizer.model.tokenize(part.replace(" ", SPACE))] if part else []
            for part in text.split(SPACE)
        )
        return [*first, *chain.from_iterable([*self._bytes(SPACE), *ids] for ids in others)]

    def _defused(self, text: str) -> Iterator[int]:
        """Yield the ids of a text that spells a control piece, cut in the middle of each spelling.

        A piece of one character cannot be cut: its bytes stand for it.
        """
        middles = [m.start() + len(m.group()) // 2 for m in self._spelled.finditer(text)]
        for start, stop in pairwise([0, *middles, len(text)]):
            for id in self._raw(text[start:stop]) if start < stop else []:
                spelled = (self._tokenizer.id_to_token(id) or "").replace(SPACE, " ")
                yield from self._bytes(spelled) if id in self._control else [id]

    def _bytes(self, text: str) -> list[int]:
        """Return the byte pieces that spell a text. Raises UserError where there are none."""
        ids = [self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        if None in ids:
            raise UserError(
                f"tokenizer must spell {text!r} within the model's rows and without control ids, got no pieces"
            )
        return ids  # type: ignore[return-value]


class TextStream:
    """Ids in, one by one, and text out as soon as its characters are whole."""

    def __init__(self, tokenizer: Tokenizer, shield: list[int], *, opens: bool) -> None:
        """`shield` is a piece of text: behind it the decoder strips no leading space."""
        self._tokenizer, self._shield = tokenizer, shield
        self._context = [] if opens else shield
        self._stream = DecodeStream(self._context, skip_special_tokens=True)
        self._held: list[int] = []

    @TOKENIZING
    def __call__(self, id: int) -> str:
        """Return the text that this id completes."""
        try:
            return self._step(id)
        except Exception:  # the library's bare one: bytes that are no UTF-8 would change text that is out
            again, self._held = self._held, []
            self._stream = DecodeStream(self._shield, skip_special_tokens=True)
            return "".join(map(self._step, again))

    @TOKENIZING
    def rest(self) -> str:
        """Return the rest at the end: half of a character, shown as the replacement character."""
        ids, self._held = [*self._context, *self._held], []
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text.removeprefix(self._tokenizer.decode(self._context, skip_special_tokens=True))

    def _step(self, id: int) -> str:
        self._held.append(id)
        piece = self._stream.step(self._tokenizer, id)
        if piece is None:
            return ""
        self._context, self._held = self._shield, []
        return piece


def steps_of(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a normalizer's description as a list."""
    return (normalizer or {}).get("normalizers", [normalizer or {}])


def falls_into_words(pieces: Collection[str]) -> bool:
    """Whether texts of a vocabulary encode word by word to the same ids."""
    spelled = (piece.replace(SPACE, " ") for piece in pieces if not BYTE.fullmatch(piece))
    return all(len(WORD.findall(text)) <= 1 for text in spelled)


class Output:
    """Told every token in turn; says whether the text ends with it.

    It ends with the token that completes a string of `stop`, as with Transformers' `stop_strings`,
    or with an id of `ends`. Only new text counts: a stop string of the prompt ends nothing.
    """

    def __init__(self, stream: TextStream, *, stop: Sequence[str] = (), ends: Collection[int] = ()) -> None:
        self._stream, self._stop, self._ends = stream, stop, ends
        self._reach = max(map(len, stop), default=1) - 1  # characters in which a stop string may have begun
        self._tail = ""
        self._pieces: list[str] = []

    def __call__(self, token: int) -> bool:
        """Whether the text ends with this token."""
        piece = self._stream(token)
        self._pieces.append(piece)
        seen = self._tail + piece
        self._tail = seen[max(0, len(seen) - self._reach) :]
        return token in self._ends or any(text in seen for text in self._stop)

    def take(self, *, finished: bool) -> list[str]:
        """Return the text of every token since the last call, "" for one that completes no character.

        The rest of a broken character goes to the last token of all.
        """
        pieces, self._pieces = self._pieces, []
        if finished:
            pieces[-1] += self._stream.rest()
        return pieces


def in_pieces(tokens: Iterable[tuple[str, str]]) -> list[list[str]]:
    """[kind, text] in turn, of each token's kind (`Step.kinds`) and text: neighbours of a kind become one."""
    pieces = list[list[str]]()
    for kind, text in tokens:
        if pieces and pieces[-1][0] == kind:
            pieces[-1][1] += text
        elif text:
            pieces.append([kind, text])
    return pieces
