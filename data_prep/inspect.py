"""python -m data_prep.inspect: look at a finished data folder, in the terminal or as one page.

Tables, sequences as training will see them, and what span replacement will do to one, by the function that will
do it. Changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.text import Text
from safetensors.numpy import load_file

from conf import UserError, run
from conf.console import PlainConsole, pictures
from conf.errors import visible
from conf.files import file_to_write
from conf.schema import PATH
from conf.stage import read_manifest
from data_prep.config import one_of, share
from data_prep.document import generator
from data_prep.encode import Encoder, Mode
from data_prep.ngrams import find_table, hash_contexts
from data_prep.shards import SPLITS, PackedSequence, Shards
from data_prep.tables import print_summary
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer, tokenizer_file
from data_prep.windows import replaceable, sample_windows, window_offsets

PAGE = "inspect.html"
REPLACED_TOKENS = 160  # of a sequence, in the example of span replacement
STARTS = 3  # tokens after which the n-gram table is continued
LENGTH = 12  # tokens that follow each of them, at most
SENTINEL = "bold white on dark_blue"
ADAPTIVE = "bold white on dark_magenta"
REPLACED = "strike grey50"
HEADING = "bold dark_green"
CUT = "italic grey50"


@dataclass
class ShowConfig:
    """What is shown."""

    html: bool = False  # write the same into out/inspect.html
    split: str = "train"  # which sequences: train or held_out
    sequences: int = 2  # how many, drawn at random
    characters: int = 240  # shown of a document, or between two of its sentinels: half from each end
    L: int = 5  # widest window of adaptive tokens, as training's objective.L
    start_rate: float = 0.1  # how often a window starts, as training's objective.start_rate
    seed: int = 0  # draws the sequences and the windows

    def __post_init__(self) -> None:
        one_of("inspect.split", self.split, SPLITS)
        share("inspect.start_rate", self.start_rate)
        if min(self.L, self.characters) < 1:
            raise ValueError("inspect.L and inspect.characters must be positive numbers")


@dataclass
class InspectConfig:
    """python -m data_prep.inspect: tables, decoded sequences and histograms of a data folder."""

    out: str = field(metadata=PATH)  # a finished folder of data_prep
    inspect: ShowConfig = field(default_factory=ShowConfig)


@dataclass(frozen=True)
class Section:
    """Lines under a title."""

    title: str
    lines: list[Text]


def main(config: InspectConfig) -> None:
    """Print everything; with html, write the same as a page."""
    manifest = read_manifest(config.out, "shards", "out")
    page = file_to_write("out", str(Path(config.out) / PAGE)) if config.inspect.html else None
    console = PlainConsole()
    print_summary(manifest, console)
    vocab = Vocab.from_json(manifest["vocab"])
    folder, tokenizer = Path(config.out), Path(config.out) / TOKENIZER
    encoder = Encoder(load_tokenizer(tokenizer), vocab)
    table = find_table(folder, vocabulary=vocab.text_size, tokenizer=tokenizer_file(tokenizer))
    ngrams = list(continuation_lines(table, manifest["ngrams"]["order"], encoder)) if table else []
    for line in ngrams:
        console.print(line)
    shards = Shards(config.out, config.inspect.split)
    sections = list(_sections(config.inspect, shards, manifest["languages"], vocab, encoder))
    for section in sections:
        console.rule(section.title, align="left")
        for line in section.lines:
            console.print(line, soft_wrap=False)
    if page:
        from data_prep.inspect_page import write_page  # matplotlib takes its time

        write_page(page, sections, ngrams, shards, manifest)
        console.print(f"inspect: wrote {page}")


def _sections(
    show: ShowConfig, shards: Shards, languages: list[str], vocab: Vocab, encoder: Encoder
) -> Iterator[Section]:
    """Yield sequences drawn at random, each with what span replacement will do to its start."""
    if not 0 <= show.sequences <= len(shards):
        raise UserError(f"inspect.sequences must be at most the {len(shards)} there are, got {show.sequences}")
    random = generator(show.seed, "inspect")
    for index in sorted(random.choice(len(shards), size=show.sequences, replace=False).tolist()):
        sequence = shards[index]
        yield Section(
            f"{show.split} sequence {index} of {len(shards)}: {sequence.used:,} tokens",
            list(sequence_lines(sequence, languages, vocab, encoder, show.characters)),
        )
        tokens = sequence.tokens[: min(sequence.used, REPLACED_TOKENS)]
        documents = sequence.documents[None, : len(tokens)]
        may = replaceable(tokens[None], documents, sorted(vocab.control))[0]
        starts, widths = sample_windows(len(tokens), L=show.L, start_rate=show.start_rate, generator=random)
        offsets = window_offsets(starts, widths, may)
        yield Section(
            f"span replacement, L={show.L}: its first {len(tokens)} tokens",
            [replacement_line(tokens, offsets, vocab, encoder)],
        )


def sequence_lines(
    sequence: PackedSequence, languages: list[str], vocab: Vocab, encoder: Encoder, characters: int
) -> Iterator[Text]:
    """Yield for each document of a sequence what it is, and its text with the sentinels marked."""
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
    """Return the decoded ids, control ids as coloured marks; what lies between two marks is shortened."""
    names = {getattr(vocab, name): name.upper() for name in ("bos", "eos", "pre", "suf", "mid", "eot")}
    text = Text()
    is_control = np.isin(ids, sorted(vocab.control))
    for part in np.split(ids, np.flatnonzero(np.diff(is_control)) + 1):
        if len(part) and int(part[0]) in vocab.control:
            for id in part.tolist():
                text.append(f"<{names.get(id, 'a')}>", SENTINEL)
        elif len(part):
            between = pictures(encoder.decode(part))
            text.append_text(shortened(between, characters) if characters else Text(between))
    return text


def shortened(text: str, characters: int) -> Text:
    """Return the start and the end of a text, where it is longer."""
    if len(text) <= characters:
        return Text(text)
    half = characters // 2
    left_out = f"\n... {len(text) - 2 * half:,} characters ...\n"
    return Text.assemble(text[:half], (left_out, CUT), text[len(text) - half :])


def replacement_line(tokens: np.ndarray, offsets: np.ndarray, vocab: Vocab, encoder: Encoder) -> Text:
    """Return tokens with the replaced ones struck through, after the adaptive token in their place."""
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


def continuation_lines(path: Path, order: int, encoder: Encoder) -> Iterator[Text]:
    """Yield, for each of the most frequent tokens that have a context, the n-grams' likeliest text after it."""
    table = load_file(path)
    ids = np.arange(len(table["unigrams"]))
    known = ids[np.isin(hash_contexts([ids]), table["keys_2"])] if order > 1 else ids[:0]
    for start in known[np.argsort(-table["unigrams"][known].astype(np.int64))][:STARTS].tolist():
        text = continue_text(table, order, [start])
        before, after = (pictures(encoder.decode(np.array(part))) for part in (text[:1], text[1:]))
        yield Text.assemble("after ", (repr(before), HEADING), ": ", repr(after))


def continue_text(table: dict[str, np.ndarray], order: int, text: list[int]) -> list[int]:
    """Return the ids and up to LENGTH more, each the likeliest after the longest context that the table has."""
    for _ in range(LENGTH):
        successor = None
        for level in range(2, min(order, len(text) + 1) + 1):
            key = hash_contexts([np.array([id]) for id in text[:-level:-1]])
            place = np.searchsorted(table[f"keys_{level}"], key)[0]
            if place < len(table[f"keys_{level}"]) and table[f"keys_{level}"][place] == key[0]:
                successor = int(table[f"ids_{level}"][table[f"first_{level}"][place]])
        if successor is None:
            break
        text = [*text, successor]
    return text


if __name__ == "__main__":
    run("inspect", InspectConfig, main)
