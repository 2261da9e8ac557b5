"""Token sequences as coloured text, for whoever looks at the data. Knows no folder."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from conf.characters import pictures
from conf.errors import visible
from data_prep.encode.encoder import Encoder
from data_prep.encode.fim import Mode
from data_prep.shards import PackedSequence
from data_prep.vocab import Vocab

SENTINEL = "bold white on dark_blue"
ADAPTIVE = "bold white on dark_magenta"
REPLACED = "strike grey50"
HEADING = "bold dark_green"
CUT = "italic grey50"


@dataclass(frozen=True)
class Section:
    """Lines under a title."""

    title: str
    lines: list[Text]


def sequence_lines(
    sequence: PackedSequence, languages: list[str], vocab: Vocab, encoder: Encoder, characters: int
) -> Iterator[Text]:
    """For each document of a sequence what it is, and its text with the sentinels marked."""
    for index, (id, span) in enumerate(zip(sequence.ids, sequence.spans, strict=True)):
        part = f", its part from token {span['offset']:,}" if span["offset"] else ""
        name = visible(f"{id} ({languages[span['language']]}")
        yield Text(
            f"\ndocument {index + 1} of {len(sequence.spans)}: {name}, {Mode(span['mode']).name}), tokens "
            f"{span['start']:,} to {span['stop']:,}{part}",
            style=HEADING,
        )
        yield marked_text(sequence.tokens[span["start"] : span["stop"]], vocab, encoder, characters)


def marked_text(ids: np.ndarray, vocab: Vocab, encoder: Encoder, characters: int | None = None) -> Text:
    """The decoded ids, control ids as coloured marks; what lies between two marks is shortened."""
    text = Text()
    is_control = np.isin(ids, sorted(vocab.control))
    for part in np.split(ids, np.flatnonzero(np.diff(is_control)) + 1):
        if len(part) and int(part[0]) in vocab.control:
            for id in part.tolist():
                text.append(mark(id, vocab), SENTINEL)
        elif len(part):
            between = pictures(encoder.decode(part))
            text.append_text(shortened(between, characters) if characters else Text(between))
    return text


def mark(id: int, vocab: Vocab) -> str:
    """The name of a control id."""
    names = {"bos": "BOS", "eos": "EOS", "pre": "PRE", "suf": "SUF", "mid": "MID", "eot": "EOT"}
    known = {getattr(vocab, field): name for field, name in names.items()}
    return f"<{known.get(id, 'a')}>"


def shortened(text: str, characters: int) -> Text:
    """The start and the end of a text, where it is longer."""
    if len(text) <= characters:
        return Text(text)
    half = characters // 2
    left_out = f"\n... {len(text) - 2 * half:,} characters ...\n"
    return Text.assemble(text[:half], (left_out, CUT), text[len(text) - half :])


def replacement_line(tokens: np.ndarray, offsets: np.ndarray, vocab: Vocab, encoder: Encoder) -> Text:
    """Tokens with the replaced ones struck through, after the adaptive token in their place."""
    text = Text()
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(offsets != 0)) + 1):
        if len(part) and offsets[part[0]]:
            for place in part:
                text.append(f"a{offsets[place]}", ADAPTIVE)
                token = pictures(encoder.decode(tokens[place : place + 1]))
                text.append(token.replace("\n", "⏎"), REPLACED)
        elif len(part):
            text.append_text(marked_text(tokens[part], vocab, encoder))
    return text
