"""python -m data_prep.inspect: look at a finished data folder, in the terminal or as one page.

The one place where data_prep looks at train: what span replacement will do to a sequence
is shown by the function that will do it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conf import UserError, run
from conf.console import PlainConsole
from conf.files import file_to_write
from conf.stage import read_manifest
from conf.typed import PATH
from data_prep.config import one_of, share
from data_prep.document import generator
from data_prep.encode.encoder import Encoder
from data_prep.inspect.ngrams import continuation_lines
from data_prep.inspect.show import Section, replacement_line, sequence_lines
from data_prep.ngrams import find_table
from data_prep.shards import SPLITS, Shards
from data_prep.tables import print_summary
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer, tokenizer_file
from train.objective import replaceable, sample_windows, window_offsets

PAGE = "inspect.html"
REPLACED_TOKENS = 160  # of a sequence, in the example of span replacement


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
            raise ValueError("inspect.L, inspect.characters: wanted positive numbers")


@dataclass
class InspectConfig:
    """python -m data_prep.inspect: tables, decoded sequences and histograms of a data folder."""

    out: str = field(metadata=PATH)  # a finished folder of data_prep
    inspect: ShowConfig = field(default_factory=ShowConfig)


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
        from data_prep.inspect.page import write_page  # matplotlib takes its time

        write_page(page, sections, ngrams, shards, manifest)
        console.print(f"inspect: wrote {page}")


def _sections(
    show: ShowConfig, shards: Shards, languages: list[str], vocab: Vocab, encoder: Encoder
) -> Iterator[Section]:
    """Sequences drawn at random, each with what span replacement will do to its start."""
    if not 0 <= show.sequences <= len(shards):
        raise UserError(
            f"inspect.sequences: wanted at most the {len(shards)} there are, found {show.sequences}"
        )
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


if __name__ == "__main__":
    run("inspect", InspectConfig, main)
