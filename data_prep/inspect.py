"""python -m data_prep.inspect: look at a finished data folder in the terminal.

Its manifest as tables, sequences as training will see them, and what span replacement will do to one, by the
function that will do it. Changes nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file

from conf import UserError, run
from conf.console import PlainConsole, pictures
from conf.errors import visible
from conf.schema import PATH
from conf.stage import read_manifest
from data_prep.config import one_of, share
from data_prep.document import generator
from data_prep.encode import Encoder, Mode
from data_prep.ngrams import find_table, hash_contexts
from data_prep.shards import SPLITS, PackedSequence, Shards
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer, tokenizer_file
from data_prep.windows import replaceable, sample_windows, window_offsets

FEW = 4  # sequences of a split below which a warning is due


def print_summary(manifest: dict[str, Any], console: Console) -> None:
    """Print languages, modes, utilisation and drops."""
    for table in (languages(manifest), splits(manifest), drops(manifest)):
        console.print(table)
    if "ngrams" in manifest:
        console.print(describe_ngrams(manifest["ngrams"]))


def warnings(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield what training will miss: a split without sequences, or next to none."""
    seq_len = manifest["seq_len"]
    remedies = {
        "train": "Give more files, or a smaller seq_len",
        "held_out": "Raise held_out, or lower seq_len",
    }
    if not manifest["settings"]["held_out"]:
        del remedies["held_out"]
    for name, remedy in remedies.items():
        if (count := manifest[name]["sequences"]) < FEW:
            yield (
                f"{name} must have at least {FEW} sequences of {seq_len} tokens to be of use, got {count}. "
                f"{remedy}."
            )


def describe_ngrams(table: dict[str, Any]) -> str:
    """Return the n-gram table's size in a line."""
    contexts = (
        ", ".join(
            f"{count:,} of order {order}" for order, count in table["contexts"].items()
        )
        or "none"
    )
    return f"N-grams: contexts {contexts}; {table['tokens']:,} tokens counted, {table['bytes'] / 1e6:,.1f} MB"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.caption_justify = "left"
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def languages(manifest: dict[str, Any]) -> Table:
    """Tabulate documents, bytes, tokens and shares of each language; with a budget, its share of it."""
    chosen = manifest.get("chosen", {})
    target = ["wanted"] if chosen else []
    by = manifest["settings"]["proportion"]["by"]
    counted = {"bytes": "bytes", "files": "documents"}[by]
    table = _table(
        "Languages",
        "language",
        "documents",
        "MB",
        "tokens",
        f"% of {by}",
        *target,
        "bytes/token",
    )
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in SPLITS:
        for language, counts in manifest[name]["languages"].items():
            sums[language].update(counts)
    whole = sum(total[counted] for total in sums.values())
    for language, total in sorted(sums.items(), key=lambda item: -item[1][counted]):
        parts = [chosen[language]] if chosen else []
        shares = [
            f"{part['share']:.2%}{'*' if part['exhausted'] else ' '}" for part in parts
        ]
        table.add_row(
            language,
            f"{total['documents']:,}",
            f"{total['bytes'] / 1e6:,.2f}",
            f"{total['tokens']:,}",
            f"{total[counted] / whole:.2%}",
            *shares,
            f"{total['bytes'] / max(1, total['tokens']):.2f}",
        )
    if any(part["exhausted"] for part in chosen.values()):
        table.caption = "* it has less than its share: all of it is taken, and the others fill the budget"
    return table


def splits(manifest: dict[str, Any]) -> Table:
    """Tabulate documents by mode, sequences, tokens and utilisation of each split."""
    table = _table(
        "Sequences",
        "split",
        "docs",
        "plain",
        "PSM",
        "SPM",
        "sequences",
        "tokens",
        "filled",
    )
    for name in SPLITS:
        split = manifest[name]
        modes = [split["modes"].get(mode.name, 0) for mode in Mode]
        table.add_row(
            name.replace("_", " "),
            f"{split['documents']:,}",
            *(f"{count / max(1, sum(modes)):.1%}" for count in modes),
            f"{split['sequences']:,}",
            f"{split['tokens']:,}",
            f"{split['filled']:.2%}",
        )
    return table


def drops(manifest: dict[str, Any]) -> Table:
    """Tabulate rows that went no further, by reason."""
    counts = manifest["counts"]
    rows = counts.get("rows", 0)
    table = _table("Rows", "", "rows", "share")
    listed = {"read": rows} | {
        f"dropped: {reason}": count for reason, count in manifest["drops"].items()
    }
    listed["not chosen"] = counts.get("not chosen", 0)
    listed["kept"] = counts.get("documents", 0)
    listed["kept, with control pieces encoded as text"] = counts.get(
        "documents with control pieces", 0
    )
    for name, count in listed.items():
        if count or name in ("read", "kept"):
            table.add_row(name, f"{count:,}", f"{count / max(1, rows):.2%}")
    return table


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

    split: str = "train"  # which sequences: train or held_out
    sequences: int = 2  # how many, drawn at random
    characters: int = (
        240  # shown of a document, or between two of its sentinels: half from each end
    )
    L: int = 5  # widest window of adaptive tokens, as training's objective.L
    start_rate: float = (
        0.1  # how often a window starts, as training's objective.start_rate
    )
    seed: int = 0  # draws the sequences and the windows

    def __post_init__(self) -> None:
        one_of("inspect.split", self.split, SPLITS)
        share("inspect.start_rate", self.start_rate)
        if min(self.L, self.characters) < 1:
            raise ValueError(
                "inspect.L and inspect.characters must be positive numbers"
            )


@dataclass
class InspectConfig:
    """python -m data_prep.inspect: tables and decoded sequences of a data folder."""

    out: str = field(metadata=PATH)  # a finished folder of data_prep
    inspect: ShowConfig = field(default_factory=ShowConfig)


TitledLines = tuple[str, list[Text]]  # lines under a title


def main(config: InspectConfig) -> None:
    """Print everything."""
    manifest = read_manifest(config.out, "shards", "out")
    console = PlainConsole()
    print_summary(manifest, console)
    vocab = Vocab.from_json(manifest["vocab"])
    folder = Path(config.out)
    tokenizer = Path(config.out) / TOKENIZER
    encoder = Encoder(load_tokenizer(tokenizer), vocab)
    table = find_table(
        folder, vocabulary=vocab.text_size, tokenizer=tokenizer_file(tokenizer)
    )
    if table:
        for line in continuation_lines(table, manifest["ngrams"]["order"], encoder):
            console.print(line)
    shards = Shards(config.out, config.inspect.split)
    for title, lines in _sections(
        config.inspect, shards, manifest["languages"], vocab, encoder
    ):
        console.rule(title, align="left")
        for line in lines:
            console.print(line, soft_wrap=False)


def _sections(
    show: ShowConfig,
    shards: Shards,
    languages: list[str],
    vocab: Vocab,
    encoder: Encoder,
) -> Iterator[TitledLines]:
    """Yield sequences drawn at random, each with what span replacement will do to its start."""
    if not 0 <= show.sequences <= len(shards):
        raise UserError(
            f"inspect.sequences must be at most the {len(shards)} there are, got {show.sequences}"
        )
    random = generator(show.seed, "inspect")
    for index in sorted(
        random.choice(len(shards), size=show.sequences, replace=False).tolist()
    ):
        sequence = shards[index]
        lines = list(
            sequence_lines(sequence, languages, vocab, encoder, show.characters)
        )
        yield (
            f"{show.split} sequence {index} of {len(shards)}: {sequence.used:,} tokens",
            lines,
        )
        tokens = sequence.tokens[: min(sequence.used, REPLACED_TOKENS)]
        documents = sequence.documents[None, : len(tokens)]
        may = replaceable(tokens[None], documents, sorted(vocab.control))[0]
        starts, widths = sample_windows(
            len(tokens), L=show.L, start_rate=show.start_rate, generator=random
        )
        offsets = window_offsets(starts, widths, may)
        lines = [replacement_line(tokens, offsets, vocab, encoder)]
        yield f"span replacement, L={show.L}: its first {len(tokens)} tokens", lines


def sequence_lines(
    sequence: PackedSequence,
    languages: list[str],
    vocab: Vocab,
    encoder: Encoder,
    characters: int,
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
        yield marked_text(
            sequence.tokens[span["start"] : span["stop"]], vocab, encoder, characters
        )


def marked_text(
    ids: np.ndarray, vocab: Vocab, encoder: Encoder, characters: int | None = None
) -> Text:
    """Return the decoded ids, control ids as coloured marks; what lies between two marks is shortened."""
    names = {
        getattr(vocab, name): name.upper()
        for name in ("bos", "eos", "pre", "suf", "mid", "eot")
    }
    text = Text()
    is_control = np.isin(ids, sorted(vocab.control))
    for part in np.split(ids, np.flatnonzero(np.diff(is_control)) + 1):
        if len(part) and int(part[0]) in vocab.control:
            for id in part.tolist():
                text.append(f"<{names.get(id, 'a')}>", SENTINEL)
        elif len(part):
            between = pictures(encoder.decode(part))
            text.append_text(
                shortened(between, characters) if characters else Text(between)
            )
    return text


def shortened(text: str, characters: int) -> Text:
    """Return the start and the end of a text, where it is longer."""
    if len(text) <= characters:
        return Text(text)
    half = characters // 2
    left_out = f"\n... {len(text) - 2 * half:,} characters ...\n"
    return Text.assemble(text[:half], (left_out, CUT), text[len(text) - half :])


def replacement_line(
    tokens: np.ndarray, offsets: np.ndarray, vocab: Vocab, encoder: Encoder
) -> Text:
    """Return tokens with the replaced ones struck through, after the adaptive token in their place."""
    text = Text()
    for part in np.split(
        np.arange(len(tokens)), np.flatnonzero(np.diff(offsets != 0)) + 1
    ):
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
    known = (
        ids[np.isin(hash_contexts([ids]), table["keys_2"])] if order > 1 else ids[:0]
    )
    for start in known[np.argsort(-table["unigrams"][known].astype(np.int64))][
        :STARTS
    ].tolist():
        text = continue_text(table, order, [start])
        before, after = (
            pictures(encoder.decode(np.array(part))) for part in (text[:1], text[1:])
        )
        yield Text.assemble("after ", (repr(before), HEADING), ": ", repr(after))


def continue_text(
    table: dict[str, np.ndarray], order: int, text: list[int]
) -> list[int]:
    """Return the ids and up to LENGTH more, each the likeliest after the longest context that the table has."""
    for _ in range(LENGTH):
        successor = None
        for level in range(2, min(order, len(text) + 1) + 1):
            key = hash_contexts([np.array([id]) for id in text[:-level:-1]])
            place = np.searchsorted(table[f"keys_{level}"], key)[0]
            if (
                place < len(table[f"keys_{level}"])
                and table[f"keys_{level}"][place] == key[0]
            ):
                successor = int(table[f"ids_{level}"][table[f"first_{level}"][place]])
        if successor is None:
            break
        text = [*text, successor]
    return text


if __name__ == "__main__":
    run("inspect", InspectConfig, main)
