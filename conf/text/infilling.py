"""Infilling formats of the families of code models: control pieces and their order.

    PSM   PRE enc(prefix) SUF inf(suffix) MID             then inf(middle)
    SPM   PRE SUF inf(suffix) MID enc(prefix)             then the middle
          SUF inf(suffix) PRE enc(prefix)                 without MID (Codestral)

EOT ends a middle; a family without EOT uses EOS. BOS comes first if the tokenizer adds it to a
text. In SPM, prefix and middle are encoded as one text. conf/text/encoding.py defines enc and inf.
The ids of the pieces are looked up in the tokenizer.

| family | pieces | published in |
|---|---|---|
| CodeLlama | ▁<PRE> ▁<SUF> ▁<MID> ▁<EOT> | Code Llama §2.3: PSM and SPM |
| CodeGemma | <|fim_prefix|> ..., ended by <|file_separator|> | its model card: PSM |
| Qwen2.5-Coder, Granite 4 | <|fim_prefix|> ... | its report §3.2, its model card: PSM |
| StarCoder 1 and 2, Granite Code, Granite 3 | <fim_prefix> ... | StarCoder §3: PSM, and SPM as CodeLlama's |
| SantaCoder | <fim-prefix> ... | SantaCoder §5: as StarCoder |
| DeepSeek-Coder | <｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜> | its report §3.1: PSM |
| Codestral | [SUFFIX] suffix [PREFIX] prefix | mistral-common: SPM |
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from tokenizers import Tokenizer

PSM, SPM = ORDERS = ("psm", "spm")

Segment = int | str  # a control id, or a text to encode by inf


@dataclass(frozen=True)
class Infilling:
    """The ids of a tokenizer's infilling pieces, and the orders of its family, the default first.

    `mid` is None for a family without a piece before the middle, `eot` for a family that ends the
    middle by EOS. `stops` are more ids that end a middle.
    """

    pre: int
    suf: int
    mid: int | None
    eot: int | None
    orders: tuple[str, ...] = ORDERS
    stops: frozenset[int] = frozenset()

    @cached_property
    def ids(self) -> frozenset[int]:
        """The ids of the infilling pieces."""
        return frozenset({self.pre, self.suf, self.mid, self.eot} - {None})  # type: ignore[arg-type]

    @cached_property
    def opener(self) -> int:
        """The control id directly before the last text of every infilling prompt."""
        return self.pre if self.mid is None else self.mid

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end a middle, in addition to EOS."""
        return self.stops if self.eot is None else self.stops | {self.eot}

    def segments(
        self,
        order: str,
        *,
        prefix: str,
        suffix: str,
        middle: str,
        lead: Callable[[str], str],
    ) -> list[Segment]:
        """Return control ids and texts up to the end of the middle.

        `lead(s)` returns the text t with inf(t) = enc(s).
        """
        mid = [] if self.mid is None else [self.mid]
        if order == PSM:
            return [self.pre, lead(prefix), self.suf, suffix, *mid, middle]
        if self.mid is None:
            return [self.suf, suffix, self.pre, lead(prefix + middle)]
        return [self.pre, self.suf, suffix, *mid, lead(prefix + middle)]


@dataclass(frozen=True)
class Family:
    """The published infilling format of a family of models.

    `stops` are pieces that end a middle in addition to EOS, by the model card. `adaptive` are pieces
    that can be adaptive tokens: no text produces them, or texts can spell them by bytes instead.
    """

    name: str
    pre: str
    suf: str
    mid: str | None
    eot: str | None = None
    orders: tuple[str, ...] = (PSM,)
    stops: tuple[str, ...] = ()
    adaptive: tuple[str, ...] = ()

    @property
    def pieces(self) -> list[str]:
        """The infilling pieces."""
        return [
            piece
            for piece in (self.pre, self.suf, self.mid, self.eot)
            if piece is not None
        ]


_DELIMITED = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_PLAIN = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
_HYPHENS = ("<fim-prefix>", "<fim-suffix>", "<fim-middle>")
_DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")

#: The family of a tokenizer is the first one with all its pieces in the tokenizer.
FAMILIES = (
    Family(
        "CodeLlama",
        *("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
        orders=ORDERS,
        # SDSAT §3.3 and App. B: the seven diverse tokens for L=7. No text produces repeated <EOT>.
        adaptive=(*("▁" + "<EOT>" * count for count in range(2, 7)), "ো", "ਿ"),
    ),
    Family("CodeGemma", *_DELIMITED, eot="<|file_separator|>", stops=_DELIMITED),
    Family(
        "Qwen2.5-Coder",
        *_DELIMITED,
        stops=(
            *("<|endoftext|>", *_DELIMITED, "<|fim_pad|>", "<|repo_name|>"),
            *("<|file_sep|>", "<|im_start|>", "<|im_end|>"),
        ),
    ),
    Family("StarCoder", *_PLAIN, orders=ORDERS, stops=("<|endoftext|>", "<file_sep>")),
    Family("SantaCoder", *_HYPHENS, orders=ORDERS, stops=("<|endoftext|>",)),
    Family("DeepSeek-Coder", *_DEEPSEEK, stops=("<｜end▁of▁sentence｜>", "<|EOT|>")),
    Family("Codestral", "[PREFIX]", "[SUFFIX]", None, orders=(SPM,), stops=("</s>",)),
)
#: Control pieces even if tokenizer.json does not mark them as special.
CONTROL = frozenset(
    piece for family in FAMILIES for piece in (*family.pieces, *family.stops)
)


def family_of(tokenizer: Tokenizer, rows: int | None = None) -> Family | None:
    """Return the family with all its infilling pieces among the first `rows` ids, or None."""
    return next(
        (
            family
            for family in FAMILIES
            if all(
                piece_id(tokenizer, piece, rows) is not None for piece in family.pieces
            )
        ),
        None,
    )


def piece_id(tokenizer: Tokenizer, piece: str | None, rows: int | None) -> int | None:
    """Return the id of a piece; None if the tokenizer lacks it or the model has no row for it."""
    id = tokenizer.token_to_id(piece) if piece else None
    return None if id is None or (rows is not None and id >= rows) else id


def find_infilling(tokenizer: Tokenizer, rows: int | None = None) -> Infilling | None:
    """Return the infilling format of a tokenizer; None if no family has its pieces in the first `rows` ids."""
    family = family_of(tokenizer, rows)
    if family is None:
        return None
    ids = {
        name: piece_id(tokenizer, getattr(family, name), rows)
        for name in ("pre", "suf", "mid", "eot")
    }
    stops = (piece_id(tokenizer, piece, rows) for piece in family.stops)
    return Infilling(
        **ids,  # type: ignore[arg-type]
        orders=family.orders,
        stops=frozenset(id for id in stops if id is not None),
    )


def with_stops(infilling: Infilling, published: Infilling | None) -> Infilling:
    """Return a model's infilling with the `stops` of its family, if both have the same ids."""
    if published is None or published.ids != infilling.ids:
        return infilling
    return replace(infilling, stops=published.stops)
