"""CodeLlama's infilling layouts, at character level (SDSAT §3.1; Code Llama §2.3).

Pure: a document's text, two cut points and a mode in; a list of control ids and texts
still to be encoded out. Encoding waits so that many documents are encoded at once.

    PLAIN   BOS enc(text)
    PSM     BOS PRE enc(prefix) SUF inf(suffix) MID inf(middle) EOT
    SPM     BOS PRE SUF inf(suffix) MID enc(prefix + middle) EOT

followed by EOS where the document ends. In SPM prefix and middle are encoded as one.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np

from data_prep.vocab import Vocab

Segment = int | str  # a control id, or text whose plain encoding stands there


class Mode(IntEnum):
    """How a document is laid out; the value is what the shards store."""

    PLAIN = 0
    PSM = 1
    SPM = 2


def choose_mode(generator: np.random.Generator, *, fim_rate: float, spm_rate: float) -> Mode:
    """PLAIN with probability 1 - fim_rate, else SPM with probability spm_rate, else PSM."""
    fim, spm = generator.random(2)
    if fim >= fim_rate:
        return Mode.PLAIN
    return Mode.SPM if spm < spm_rate else Mode.PSM


def choose_cuts(generator: np.random.Generator, length: int) -> tuple[int, int]:
    """Two cut points, uniform over the `length + 1` places between characters, in order."""
    first, second = sorted(generator.integers(0, length + 1, size=2).tolist())
    return first, second


def lay_out(
    text: str,
    mode: Mode,
    cuts: tuple[int, int],
    *,
    vocab: Vocab,
    lead: Callable[[str], str],
    ends: bool = True,
) -> list[Segment]:
    """The document's segments; `lead(s)` is the text whose plain encoding is enc(s).

    Raises ValueError for an infilling mode where the vocabulary has no infilling pieces.
    """
    eos = [vocab.eos] if ends else []
    if mode is Mode.PLAIN:
        return [vocab.bos, lead(text), *eos]
    if vocab.pre is None or vocab.suf is None or vocab.mid is None or vocab.eot is None:
        raise ValueError(f"{mode.name} wanted, but the vocabulary has no infilling pieces")
    prefix, middle, suffix = text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]
    head: list[Segment] = [vocab.bos, vocab.pre]
    if mode is Mode.PSM:
        return [*head, lead(prefix), vocab.suf, suffix, vocab.mid, middle, vocab.eot, *eos]
    return [*head, vocab.suf, suffix, vocab.mid, lead(prefix + middle), vocab.eot, *eos]
