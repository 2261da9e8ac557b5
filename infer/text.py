"""Prompts to ids exactly as training encoded its documents, and ids back to text.

    plain   BOS enc(text)
    PSM     BOS PRE enc(prefix) SUF inf(suffix) MID        the model goes on with inf(middle) EOT
    SPM     BOS PRE SUF inf(suffix) MID enc(prefix)        the model goes on with the middle, EOT

What enc and inf are, and that no text becomes a control id, is conf.encoding's. (SDSAT §3.1; Code Llama §2.3.)
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from conf import UserError
from conf.encoding import TextEncoder
from conf.errors import TOKENIZING
from infer.config import Infill

BROKEN = "\ufffd"  # what stands for bytes that are no UTF-8


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
        tokenizer.encode_special_tokens = True
        self._bos = tokenizer.encode("").ids if bos is None else [bos]
        if rows is not None and any(id >= rows for id in self._bos):
            among = f"among the model's {rows} rows"
            raise UserError(
                f"tokenizer: the ids that open a text must be {among}, got {self._bos}"
            )
        self._encoder = TextEncoder(tokenizer, control=control, rows=rows)
        self._tokenizer = tokenizer
        self._infilling = infilling
        self.pieces = self._encoder.pieces

    @TOKENIZING
    def encode(self, text: str) -> list[int]:
        """Return BOS enc(text)."""
        return [*self._bos, *self._enc(text)]

    @TOKENIZING
    def infill(self, prompt: Infill) -> list[int]:
        """Return the prompt whose continuation, up to EOT, is the middle. Raises NoInfilling."""
        ids = self._infilling
        if ids is None:
            reason = "got no infilling ids in its adaptive.json"
            raise NoInfilling(f"infill needs a model trained for infilling, {reason}")
        prefix = self._enc(prompt.prefix)
        suffix = self._inf(prompt.suffix)
        if prompt.order == "psm":
            return [*self._bos, ids.pre, *prefix, ids.suf, *suffix, ids.mid]
        return [*self._bos, ids.pre, ids.suf, *suffix, ids.mid, *prefix]

    def decode(self, ids: Sequence[int]) -> str:
        """Return text without control pieces: what a stream of these ids gives."""
        with TOKENIZING:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        if BROKEN not in text:
            return text
        # Byte pieces that are no UTF-8 break all byte pieces beside them, which a stream has given by then.
        stream = self.stream(opens=True)
        return "".join(map(stream, ids)) + stream.rest()

    @TOKENIZING
    def stream(self, *, opens: bool) -> "TextStream":
        """Return a stream for the ids behind a prompt; `opens` where they are the first of a text."""
        return TextStream(self._tokenizer, self._inf("a"), opens=opens)

    def ends(self, prompt: Sequence[int]) -> frozenset[int]:
        """Return the ids that end the text behind a prompt beside EOS: EOT, for infilling."""
        ids = self._infilling
        return frozenset([ids.eot] if ids is not None and ids.mid in prompt else ())

    def unseen(self, stop: Sequence[str]) -> frozenset[int]:
        """Return the ids of special pieces, which no text shows, that contain a string of `stop`."""
        pieces = self._tokenizer.get_added_tokens_decoder().items()
        return frozenset(
            id
            for id, p in pieces
            if p.special and any(string in p.content for string in stop)
        )

    def is_empty(self, ids: Sequence[int]) -> bool:
        """Return whether this is the prompt of an empty text."""
        return list(ids) == self._bos

    def _enc(self, text: str) -> list[int]:
        return self._inf(self._encoder.lead(text))

    def _inf(self, text: str) -> list[int]:
        """Encode text. Raises UserError for what no UTF-8 can hold, as an argument in another encoding."""
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError("prompt must be text in UTF-8, got other bytes")
        return self._encoder.inf(text)


class TextStream:
    """Ids in, one by one, and text out as soon as its characters are whole."""

    def __init__(self, tokenizer: Tokenizer, shield: list[int], *, opens: bool) -> None:
        """Keep `shield`, a piece of text: behind it the decoder strips no leading space."""
        self._tokenizer = tokenizer
        self._shield = shield
        self._context = [] if opens else shield
        self._stream = DecodeStream(self._context, skip_special_tokens=True)
        self._held: list[int] = []

    @TOKENIZING
    def __call__(self, id: int) -> str:
        """Return the text that this id completes."""
        try:
            return self._step(id)
        except Exception:  # the library's bare one: bytes that are no UTF-8 would change text that is out
            again = self._held
            self._held = []
            self._stream = DecodeStream(self._shield, skip_special_tokens=True)
            return "".join(map(self._step, again))

    @TOKENIZING
    def rest(self) -> str:
        """Return the rest at the end: half of a character, shown as the replacement character."""
        ids = [*self._context, *self._held]
        self._held = []
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text.removeprefix(
            self._tokenizer.decode(self._context, skip_special_tokens=True)
        )

    def _step(self, id: int) -> str:
        self._held.append(id)
        piece = self._stream.step(self._tokenizer, id)
        if piece is None:
            return ""
        self._context = self._shield
        self._held = []
        return piece


class Output:
    """Takes every token in turn and says whether it ends the text: by completing a string of `stop`, as with
    Transformers' `stop_strings`, or by an id of `ends`. A stop string of the prompt ends nothing.
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        stop: Sequence[str] = (),
        ends: Collection[int] = (),
    ) -> None:
        self._stream = stream
        self._stop = stop
        self._ends = ends
        self._reach = (
            max(map(len, stop), default=1) - 1
        )  # characters in which a stop string may have begun
        self._tail = ""
        self._pieces: list[str] = []

    def __call__(self, token: int) -> bool:
        """Return whether the text ends with this token."""
        piece = self._stream(token)
        self._pieces.append(piece)
        seen = self._tail + piece
        self._tail = seen[max(0, len(seen) - self._reach) :]
        return token in self._ends or any(text in seen for text in self._stop)

    def take(self, *, finished: bool) -> list[str]:
        """Return the text of every token since the last call, "" for one that completes no character.

        The rest of a broken character goes to the last token of all.
        """
        pieces = self._pieces
        self._pieces = []
        if finished:
            pieces[-1] += self._stream.rest()
        return pieces


def in_pieces(tokens: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Yield [kind, text] of each token's kind (`Step.kinds`) and text: neighbours of a kind become one."""
    pieces: list[list[str]] = []
    for kind, text in tokens:
        if pieces and pieces[-1][0] == kind:
            pieces[-1][1] += text
        elif text:
            pieces.append([kind, text])
    return pieces
