"""python -m data_prep.inspect: show a finished data folder in the terminal.

Print the manifest as tables, then a few sequences as text. It changes no files. train.inspect
shows sequences with the windows of a recipe.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich.text import Text

from conf.console import PlainConsole, pictures, print_line
from conf.errors import UserError, counted, visible
from conf.runs.stage import read_manifest
from conf.settings.cli import run
from conf.settings.schema import check_settings, setting
from data_prep.config import parse_budget
from data_prep.document import DROPS, NOT_READ, generator
from data_prep.encode import Encoder, Mode
from data_prep.shards import SPLITS, PackedSequence, Shards
from data_prep.vocab import SENTINELS, TOKENIZER, Vocab, load_tokenizer

LEAST_SEQUENCES = 4  # fewer sequences in a split cause a warning
# A budget, or a language's share of it, that is missed by more than this ratio causes a warning.
NOTICEABLE = 0.05
STYLES = {
    "control": "bold white on dark_blue",
    "heading": "bold dark_green",
}


#: A table: title, column heads, rows.
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


@dataclass
class ShowConfig:
    """The sequences to show."""

    #: split to show sequences of: train or held_out
    split: str = setting("train", choices=SPLITS)
    #: number of sequences to show, drawn at random
    sequences: int = setting(2, least=0)
    #: number of tokens to show of each sequence
    tokens: int = setting(300, least=1)
    #: seed for drawing sequences
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self, "inspect")


@dataclass
class InspectConfig:
    """python -m data_prep.inspect: tables and decoded sequences of a data folder."""

    #: finished folder of data_prep to show
    out: str = setting(path=True)
    inspect: ShowConfig = field(default_factory=ShowConfig)


def main(config: InspectConfig) -> None:
    """Print the tables and warnings, then random sequences."""
    manifest = read_manifest(config.out, "shards", "out")
    console = PlainConsole()
    print_summary(manifest, console)
    for warning in warnings(manifest):
        print_line(f"warning: {warning}")
    show = config.inspect
    vocab = Vocab.from_json(manifest["vocab"])
    encoder = Encoder(load_tokenizer(f"{config.out}/{TOKENIZER}"), vocab)
    shards = Shards(config.out, show.split)
    if show.sequences > len(shards):
        raise UserError(
            f"inspect.sequences must be at most {len(shards)}, the number of sequences of "
            f"split {show.split}, got {show.sequences}. Lower it"
        )
    random = generator(show.seed, "inspect")
    indices = random.choice(len(shards), size=show.sequences, replace=False)
    for index in sorted(indices.tolist()):
        sequence = shards[index]
        title = f"{show.split} sequence {index} of {len(shards)}: "
        console.rule(f"{title}{counted(sequence.used, 'token')}", align="left")
        decode = partial(plain_text, sequence.tokens, encoder)
        lines = sequence_lines(sequence, show.tokens, manifest["languages"], decode)
        for line in lines:
            console.print(line, soft_wrap=True)


def sequence_lines(
    sequence: PackedSequence,
    tokens: int,
    languages: list[str],
    decode: Callable[[int, int], Text],
) -> Iterator[Text]:
    """Yield each document's heading and text, within the first `tokens` tokens of a sequence.

    `decode` returns the text of tokens start:stop.
    """
    for id, span in zip(sequence.ids, sequence.spans, strict=True):
        start = int(span["start"])
        stop = min(int(span["stop"]), tokens)
        if start >= stop:
            return
        name = visible(f"{id} ({languages[span['language']]}")
        heading = f"\n{name}, {Mode(span['mode']).name}), tokens {start:,} to {stop:,}"
        yield Text(heading, style=STYLES["heading"])
        yield decode(start, stop)


def plain_text(tokens: np.ndarray, encoder: Encoder, start: int, stop: int) -> Text:
    """Return the text of tokens start:stop."""
    return append_tokens(Text(), tokens[start:stop], encoder)


def append_tokens(text: Text, ids: np.ndarray, encoder: Encoder) -> Text:
    """Append decoded ids to a text, control pieces as <NAME>; return the text.

    Other pieces that end a text, such as a chat's end of turn, have no name and appear as spelled.
    """
    vocab = encoder.vocab
    pieces = {id: encoder.tokenizer.id_to_token(id) or f"<{id}>" for id in vocab.ends}
    shown = {id: pictures(piece) for id, piece in pieces.items()}
    shown |= {getattr(vocab, name): f"<{name.upper()}>" for name in SENTINELS}
    controls = np.isin(ids, sorted(vocab.control))
    for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(controls)) + 1):
        if len(part) and controls[part[0]]:
            for id in ids[part].tolist():
                text.append(shown.get(id, "<a>"), STYLES["control"])
        else:
            text.append(pictures(encoder.decode(ids[part])))
    return text


def print_summary(manifest: dict[str, Any], console: PlainConsole) -> None:
    """Print tables of languages, splits and drops, and the size of the n-gram table."""
    for part in (languages(manifest), splits(manifest), drops(manifest)):
        console.table(*part)
    if ngrams := manifest.get("ngrams"):
        contexts = ", ".join(
            f"{count:,} of order {order}" for order, count in ngrams["contexts"].items()
        )
        console.print(
            f"N-gram table: contexts {contexts or '0'}; counted over {ngrams['tokens']:,} "
            f"tokens; {ngrams['bytes'] / 1e6:,.1f} MB",
            soft_wrap=True,
        )


def warnings(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield warnings: files that were not read to their end, a budget that is not met, small splits."""
    if files := manifest["drops"].get(NOT_READ):
        yield (
            f"the rest of {counted(files, 'file')} is not read, after invalid JSON or a row above "
            f"data.max_bytes ({DROPS}). Write JSON lines, where only such a row is dropped."
        )
    if chosen := manifest.get("chosen"):  # absent without a budget
        yield from _budget_warnings(manifest, chosen)
    remedies = {
        "train": "Give more files, or a smaller seq_len",
        "held_out": "Raise held_out, or lower seq_len",
    }
    for name, remedy in remedies.items():
        count = manifest[name]["sequences"]
        needed = name == "train" or manifest["settings"]["held_out"]
        if needed and count < LEAST_SEQUENCES:
            yield (
                f"{name} should have at least {LEAST_SEQUENCES} sequences of "
                f"{manifest['seq_len']} tokens, got {count}. {remedy}."
            )


def _budget_warnings(manifest: dict[str, Any], chosen: dict[str, Any]) -> Iterator[str]:
    """Yield warnings: a budget that is missed, languages with less data than their share of it."""
    settings = manifest["settings"]
    sums = _language_sums(manifest)
    tokens = sum(total["tokens"] for total in sums.values())
    budget = parse_budget(settings["budget"])
    if abs(tokens - budget) > NOTICEABLE * budget:
        parts = [part for part in chosen.values() if part["share"]]
        reason = "documents are chosen whole, by their bytes"
        if all(part["exhausted"] for part in parts):
            reason = "the data has no more. Give more files, or lower budget"
        yield f"budget={settings['budget']}, got {tokens:,} tokens: {reason}."
    unit = "bytes" if settings["proportion"]["by"] == "bytes" else "documents"
    whole = sum(total[unit] for total in sums.values())
    small = [
        f"{name} has {sums[name][unit] / whole:.1%} of the {unit} instead of {part['share']:.1%}"
        for name, part in chosen.items()
        if part["exhausted"]
        and sums[name][unit] < (1 - NOTICEABLE) * part["share"] * whole
    ]
    if small:
        yield f"a language has less data than its share: {', '.join(small)}."
    if absent := manifest.get("without_data"):  # earlier versions did not record it
        yield (
            f"the data has no {', '.join(absent)}, which proportion.table lists; the other languages "
            "fill the budget."
        )
    rows, unlisted = manifest["counts"]["rows"], manifest.get("unlisted")
    dropped = manifest["drops"].get("unknown language", 0)
    if unlisted and dropped > NOTICEABLE * rows:
        yield (
            f"proportion.table does not list the languages of {dropped:,} of {counted(rows, 'row')}, such "
            f"as {', '.join(map(visible, unlisted))}. Spell its languages as in the data."
        )


def _language_sums(manifest: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return the documents, bytes and tokens of each language in all splits."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in SPLITS:
        for language, counts in manifest[name]["languages"].items():
            sums[language].update(counts)
    return sums


def languages(manifest: dict[str, Any]) -> Table:
    """Tabulate the documents, MB, tokens and share of bytes of each language."""
    sums = _language_sums(manifest)
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


def splits(manifest: dict[str, Any]) -> Table:
    """Tabulate the documents by mode, sequences and tokens of each split."""
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


def drops(manifest: dict[str, Any]) -> Table:
    """Tabulate the rows by outcome: read, dropped by reason, not chosen, kept."""
    counts = manifest["counts"]
    reasons = {f"dropped: {name}": n for name, n in manifest["drops"].items()}
    outcomes = {
        "read": counts["rows"],
        **reasons,
        "not chosen": counts.get("not chosen", 0),
        "kept": counts["documents"],
        "kept, with control pieces encoded as text": counts[
            "documents with control pieces"
        ],
    }
    rows = [(name, f"{count:,}") for name, count in outcomes.items() if count]
    return "Rows", ("", "rows"), rows


if __name__ == "__main__":
    run("inspect", InspectConfig, main)
