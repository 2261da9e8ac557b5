"""python -m data_prep.inspect: show a finished data folder in the terminal.

Its manifest as tables, then a few sequences with the windows of adaptive tokens that
training would draw, by the function that draws them. Changes nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.text import Text

from conf.console import PlainConsole, pictures
from conf.errors import UserError, visible
from conf.runs.stage import read_manifest
from conf.settings.cli import run
from conf.settings.schema import check_settings, setting
from data_prep.document import generator
from data_prep.encode import Encoder, Mode
from data_prep.shards import SPLITS, PackedSequence, Shards
from data_prep.vocab import SENTINELS, TOKENIZER, Vocab, load_tokenizer
from data_prep.windows import replaceable, sample_windows, window_offsets

LEAST_SEQUENCES = 4  # of a split; fewer are warned of
START_RATE = 0.1  # of windows, training's default
STYLES = {
    "control": "bold white on dark_blue",
    "adaptive": "bold white on dark_magenta",
    "replaced": "strike grey50",
    "heading": "bold dark_green",
}


#: Of a table: its title, the heads of its columns, and its rows.
Tabulated = tuple[str, Sequence[str], Sequence[Sequence[str]]]


@dataclass
class ShowConfig:
    """Which sequences are shown, and how much of them."""

    #: the split of the sequences
    split: str = setting("train", choices=SPLITS)
    #: number of sequences, drawn at random
    sequences: int = setting(2, least=0)
    #: tokens shown of each sequence
    tokens: int = setting(300, least=1)
    #: widest window of adaptive tokens, as training's objective.L
    L: int = setting(5, least=1)
    #: seed of the sequences and windows
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self, "inspect")


@dataclass
class InspectConfig:
    """python -m data_prep.inspect: tables and decoded sequences of a data folder."""

    #: a finished folder of data_prep
    out: str = setting(path=True)
    inspect: ShowConfig = field(default_factory=ShowConfig)


def main(config: InspectConfig) -> None:
    """Print the tables, then sequences drawn at random."""
    manifest = read_manifest(config.out, "shards", "out")
    console = PlainConsole()
    print_summary(manifest, console)
    show = config.inspect
    vocab = Vocab.from_json(manifest["vocab"])
    encoder = Encoder(load_tokenizer(f"{config.out}/{TOKENIZER}"), vocab)
    shards = Shards(config.out, show.split)
    if show.sequences > len(shards):
        raise UserError(
            f"inspect.sequences must be at most the {len(shards)} there are, got "
            f"{show.sequences}"
        )
    random = generator(show.seed, "inspect")
    indices = random.choice(len(shards), size=show.sequences, replace=False)
    for index in sorted(indices.tolist()):
        sequence = shards[index]
        title = f"{show.split} sequence {index} of {len(shards)}: "
        console.rule(f"{title}{sequence.used:,} tokens", align="left")
        offsets = draw_offsets(sequence, show, vocab, random)
        for line in sequence_lines(sequence, offsets, manifest["languages"], encoder):
            console.print(line)


def draw_offsets(
    sequence: PackedSequence,
    show: ShowConfig,
    vocab: Vocab,
    random: np.random.Generator,
) -> np.ndarray:
    """Draw windows over the sequence's first tokens; return their (n,) offsets."""
    tokens = sequence.tokens[: min(sequence.used, show.tokens)]
    documents = sequence.documents[: len(tokens)]
    starts, widths = sample_windows(
        len(tokens), L=show.L, start_rate=START_RATE, generator=random
    )
    free = replaceable(tokens[None], documents[None], sorted(vocab.control))[0]
    return window_offsets(starts, widths, free)


def sequence_lines(
    sequence: PackedSequence,
    offsets: np.ndarray,
    languages: list[str],
    encoder: Encoder,
) -> Iterator[Text]:
    """Yield each document's name, and its text with the windows marked.

    Tokens beyond the (n,) offsets are left out.
    """
    for id, span in zip(sequence.ids, sequence.spans, strict=True):
        start = int(span["start"])
        stop = min(int(span["stop"]), len(offsets))
        if start >= stop:
            return
        name = visible(f"{id} ({languages[span['language']]}")
        heading = f"\n{name}, {Mode(span['mode']).name}), tokens {start:,} to {stop:,}"
        yield Text(heading, style=STYLES["heading"])
        yield marked_text(sequence.tokens[start:stop], offsets[start:stop], encoder)


def marked_text(ids: np.ndarray, offsets: np.ndarray, encoder: Encoder) -> Text:
    """Return decoded ids with marks: control pieces as <NAME>, windows as a1, a2, ...

    A token in a window is struck through after its mark.
    """
    text = Text()
    names = {getattr(encoder.vocab, name): name.upper() for name in SENTINELS}
    controls = np.isin(ids, sorted(encoder.vocab.control))
    kinds = np.where(controls, -1, offsets)
    for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(kinds)) + 1):
        kind = kinds[part[0]] if len(part) else -1
        if kind < 0:
            for id in ids[part].tolist():
                text.append(f"<{names.get(id, 'a')}>", STYLES["control"])
            continue
        decoded = pictures(encoder.decode(ids[part]))
        if kind:
            text.append(f"a{kind}", STYLES["adaptive"])
            text.append(decoded.replace("\n", "⏎"), STYLES["replaced"])
        else:
            text.append(decoded)
    return text


def print_summary(manifest: dict[str, Any], console: PlainConsole) -> None:
    """Print languages, splits, drops and the n-gram table's size."""
    for part in (languages(manifest), splits(manifest), drops(manifest)):
        console.table(*part)
    if ngrams := manifest.get("ngrams"):
        contexts = ", ".join(
            f"{count:,} of order {order}" for order, count in ngrams["contexts"].items()
        )
        console.print(
            f"N-grams: contexts {contexts or 'none'}; {ngrams['tokens']:,} tokens "
            f"counted, {ngrams['bytes'] / 1e6:,.1f} MB"
        )


def warnings(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each split that has too few sequences for training."""
    remedies = {
        "train": "Give more files, or a smaller seq_len",
        "held_out": "Raise held_out, or lower seq_len",
    }
    for name, remedy in remedies.items():
        count = manifest[name]["sequences"]
        wanted = name == "train" or manifest["settings"]["held_out"]
        if wanted and count < LEAST_SEQUENCES:
            yield (
                f"{name} must have at least {LEAST_SEQUENCES} sequences of "
                f"{manifest['seq_len']} tokens to be of use, got {count}. {remedy}."
            )


def languages(manifest: dict[str, Any]) -> Tabulated:
    """Tabulate documents, bytes and tokens of each language, and its share of the bytes."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in SPLITS:
        for language, counts in manifest[name]["languages"].items():
            sums[language].update(counts)
    whole = sum(total["bytes"] for total in sums.values())
    rows = [
        (
            language,
            f"{total['documents']:,}",
            f"{total['bytes'] / 1e6:,.2f}",
            f"{total['tokens']:,}",
            f"{total['bytes'] / whole:.2%}",
        )
        for language, total in sorted(sums.items(), key=lambda item: -item[1]["bytes"])
    ]
    columns = ("language", "documents", "MB", "tokens", "% of bytes")
    return "Languages", columns, rows


def splits(manifest: dict[str, Any]) -> Tabulated:
    """Tabulate documents by mode, sequences and tokens of each split."""
    present = {mode for name in SPLITS for mode in manifest[name]["modes"]}
    modes = [mode.name for mode in Mode if mode.name in present]
    columns = ["split", "documents", *modes, "sequences", "tokens", "filled"]
    rows = []
    for name in SPLITS:
        split = manifest[name]
        counts = [f"{split['modes'].get(mode, 0):,}" for mode in modes]
        sizes = [f"{split['sequences']:,}", f"{split['tokens']:,}"]
        documents = f"{split['documents']:,}"
        rows.append([name, documents, *counts, *sizes, f"{split['filled']:.2%}"])
    return "Sequences", columns, rows


def drops(manifest: dict[str, Any]) -> Tabulated:
    """Tabulate the rows that were read, by what became of them."""
    counts = manifest["counts"]
    reasons = {f"dropped: {name}": n for name, n in manifest["drops"].items()}
    fates = {
        "read": counts["rows"],
        **reasons,
        "not chosen": counts.get("not chosen", 0),
        "kept": counts["documents"],
        "kept, with control pieces encoded as text": counts[
            "documents with control pieces"
        ],
    }
    rows = [(name, f"{count:,}") for name, count in fates.items() if count]
    return "Rows", ("", "rows"), rows


if __name__ == "__main__":
    run("inspect", InspectConfig, main)
