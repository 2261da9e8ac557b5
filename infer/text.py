"""Encode prompts exactly as training encoded its documents, and decode ids to text.

    plain   BOS enc(text)
    PSM     BOS PRE enc(prefix) SUF inf(suffix) MID     then inf(middle) EOT
    SPM     BOS PRE SUF inf(suffix) MID enc(prefix)     then the middle and EOT

conf/text/encoding.py defines enc and inf, which never encode text as a control id (SDSAT §3.1;
Code Llama §2.3). conf/text/infilling.py has the differences between families of models. The
model writes the last column.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from conf.errors import TOKENIZER_ERRORS, UserError
from conf.text.encoding import SPACE, TextEncoder, prefix_ids
from conf.text.infilling import SPM, Infilling
from infer.config import Infill

REPLACEMENT = "\ufffd"  # replaces bytes that are not UTF-8


class NoInfilling(UserError):
    """The model has no infilling, or does not support the order of the prompt."""


class Text:
    """A tokenizer with the control ids of a model directory.

    Text is never encoded as an id of `control`, or as an id of at least `rows`, which has no
    embedding in the model. `pieces` maps all other ids to their pieces. Every prompt begins
    with `bos`; None: with the ids that the tokenizer itself adds before a text.
    """

    @TOKENIZER_ERRORS
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        control: Collection[int] = (),
        rows: int | None = None,
        bos: int | None = None,
        infilling: Infilling | None = None,
    ) -> None:
        self._encoder = TextEncoder(tokenizer, control=control, rows=rows)
        self._tokenizer = tokenizer
        self._bos = prefix_ids(tokenizer, {}) if bos is None else [bos]
        self._infilling = infilling
        self.pieces = self._encoder.pieces

    @property
    def encoder(self) -> TextEncoder:
        """The encoder of texts, with the control ids."""
        return self._encoder

    @TOKENIZER_ERRORS
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as it begins a document: BOS, then the text."""
        return [*self._bos, *self._enc(text)]

    @TOKENIZER_ERRORS
    def infill(self, prompt: Infill, *, published: bool = True) -> list[int]:
        """Return the ids of an infilling prompt; the model continues with the middle and EOT.

        With `published=False` the prompt may have an order that the model's family has not
        published. Raises NoInfilling as `order` does.
        """
        order = self.order(prompt if published else replace(prompt, order=None))
        order = order if published else prompt.order or order
        infilling = self._infilling
        assert infilling is not None
        segments = infilling.segments(
            order,
            prefix=prompt.prefix,
            suffix=prompt.suffix,
            middle="",
            lead=self._encoder.lead,
        )
        ids = [
            self._inf(part) if isinstance(part, str) else [part] for part in segments
        ]
        return [*self._bos, *chain.from_iterable(ids)]

    def order(self, prompt: Infill) -> str:
        """Return the order of the prompt's parts, by default the order of the model's family.

        Raises NoInfilling for a model without infilling, and for an order that its family has
        not published.
        """
        if self._infilling is None:
            raise NoInfilling(
                "infill needs a model trained for infilling, got a directory without "
                "infilling pieces in its tokenizer and adaptive.json."
            )
        orders = self._infilling.orders
        if prompt.order not in (None, *orders):
            raise NoInfilling(
                f"infill.order must be {orders[0]}, the order of this family of models, "
                f"got {prompt.order}. Omit it."
            )
        return prompt.order or orders[0]

    def has_order(self, order: str) -> bool:
        """Return True if the model's family has published this order."""
        return self._infilling is not None and order in self._infilling.orders

    def with_own_order(self, prompt: Infill) -> Infill:
        """Return the prompt, without its order if the model's family has not published it."""
        orders = self._infilling.orders if self._infilling else ()
        return prompt if prompt.order in orders else replace(prompt, order=None)

    def opens(self, prompt: Infill) -> bool:
        """Return True if the middle begins a text, as in SPM with an empty prefix."""
        return self.order(prompt) == SPM and not prompt.prefix

    def spelled_pieces(self, *texts: str) -> list[str]:
        """Return the control pieces that occur in texts, where they are encoded as text."""
        special = (
            piece.content
            for piece in self._tokenizer.get_added_tokens_decoder().values()
            if piece.special
        )
        names = {piece.lstrip(SPACE) or piece for piece in special}
        names.update(self._encoder.spellings)
        return sorted(
            name for name in names if len(name) > 1 and any(name in t for t in texts)
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without control pieces, as `stream` returns it."""
        with TOKENIZER_ERRORS:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        if REPLACEMENT not in text:
            return text
        # A byte piece that is not UTF-8 also breaks the valid byte pieces beside it. A stream
        # has returned their text before.
        stream = self.stream(opens=True)
        return "".join(map(stream, ids)) + stream.rest()

    @TOKENIZER_ERRORS
    def stream(self, *, opens: bool) -> "TextStream":
        """Return a stream for the ids after a prompt. With `opens` they begin a text."""
        return TextStream(self._tokenizer, self._inf("a"), opens=opens)

    def ends(self, prompt: Sequence[int]) -> frozenset[int]:
        """Return the ids besides EOS that end the text: for an infilling prompt its end pieces."""
        infilling = self._infilling
        infills = infilling is not None and infilling.opener in prompt
        return infilling.ends if infilling and infills else frozenset()

    def special_pieces(self) -> dict[int, str]:
        """Return the special pieces by id. Decoded text does not show them."""
        pieces = self._tokenizer.get_added_tokens_decoder().items()
        return {id: piece.content for id, piece in pieces if piece.special}

    @TOKENIZER_ERRORS
    def with_special(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special pieces, as stop strings see a prompt."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def is_empty(self, ids: Sequence[int]) -> bool:
        """Return True if these ids encode an empty text."""
        return list(ids) == self._bos

    def _enc(self, text: str) -> list[int]:
        return self._inf(self._encoder.lead(text))

    def _inf(self, text: str) -> list[int]:
        """Encode a text. Raises UserError for surrogates, which another encoding leaves."""
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(
                "prompt must be text in UTF-8, got other bytes. Convert it to UTF-8."
            )
        return self._encoder.inf(text)


class TextStream:
    """Decodes ids one by one, and returns text as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, shield: list[int], *, opens: bool) -> None:
        """Create a stream. `shield` are ids of a text after which the decoder keeps a space."""
        self._tokenizer = tokenizer
        self._shield = shield
        self._context = [] if opens else shield
        self._stream = DecodeStream(self._context, skip_special_tokens=True)
        self._pending: list[int] = []

    @TOKENIZER_ERRORS
    def __call__(self, id: int) -> str:
        """Return the text that this id completes."""
        try:
            return self._step(id)
        # tokenizers raises a bare Exception if bytes that are not UTF-8 would change text
        # that it has already returned.
        except Exception:
            ids = self._pending
            self._pending = []
            self._stream = DecodeStream(self._shield, skip_special_tokens=True)
            return "".join(map(self._step, ids))

    @TOKENIZER_ERRORS
    def rest(self) -> str:
        """Return the text of pending ids at the end: U+FFFD for an incomplete character."""
        text = self._pending_text()
        self._pending = []
        return text

    @TOKENIZER_ERRORS
    def unfinished(self) -> str:
        """Return the complete characters of the pending ids.

        A token may end a character, or be a space, and also begin the next character.
        """
        return self._pending_text().rstrip(REPLACEMENT)

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        ids = [*self._context, *self._pending]
        before = self._tokenizer.decode(self._context, skip_special_tokens=True)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text.removeprefix(before)

    def _step(self, id: int) -> str:
        self._pending.append(id)
        piece = self._stream.step(self._tokenizer, id)
        if piece is None:
            return ""
        self._context = self._shield
        self._pending = []
        return piece


class Output:
    r"""Decodes the tokens of a text one by one, and returns whether a token ends the text.

    A token ends the text if it completes a string of `stop`, as Transformers' `stop_strings`
    do, or if it is an id of `ends`. A stop string may begin in `before`, the text of the prompt,
    and in `special` pieces, which the text does not show. One that ends in the prompt does not
    end the text:

        before "x = 1\n"   token "def"   stop "\ndef"   the end
                                         stop "1\n"     not the end
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        stop: Sequence[str] = (),
        ends: Collection[int] = (),
        before: str = "",
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._stream = stream
        self._stop = stop
        self._ends = ends
        self._special = special
        # A stop string may begin up to this many characters before a token.
        self._reach = max(map(len, stop), default=1) - 1
        self._tail = self._end_of(before)
        self._pieces: list[str] = []

    def __call__(self, token: int) -> bool:
        """Return True if the text ends with this token."""
        piece = self._stream(token)
        self._pieces.append(piece)
        seen = len(self._tail)
        text = self._tail + self._special.get(token, piece)
        self._tail = self._end_of(text)
        if self._stop and not piece:
            text += self._stream.unfinished()
        return token in self._ends or any(
            # The string must end after the text that was seen before.
            text.find(string, max(0, seen - len(string) + 1)) >= 0
            for string in self._stop
        )

    def _end_of(self, text: str) -> str:
        return text[max(0, len(text) - self._reach) :]

    def take(self, *, finished: bool) -> list[str]:
        """Return the text that each token since the last call completes, possibly "".

        With `finished` the last token also gets the text of an incomplete character.
        """
        pieces = self._pieces
        self._pieces = []
        if finished:
            pieces[-1] += self._stream.rest()
        return pieces
