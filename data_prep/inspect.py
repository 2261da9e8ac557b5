"""python -m data_prep.inspect: look at a finished data folder, in the terminal or as one page.

Its manifest as tables, sequences as training will see them, and what span replacement will do to one, by the
function that will do it. Changes nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file

from conf import UserError, run
from conf.console import PlainConsole, label, pictures
from conf.errors import visible
from conf.files import file_to_write, write_bytes
from conf.html import LIGHT, inline_svg, page, plot_style, variables
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
    contexts = ", ".join(f"{count:,} of order {order}" for order, count in table["contexts"].items()) or "none"
    return f"N-grams: contexts {contexts}; {table['tokens']:,} tokens counted, {table['bytes'] / 1e6:,.1f} MB"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
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
    table = _table("Languages", "language", "documents", "MB", "tokens", f"% of {by}", *target, "bytes/token")
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in SPLITS:
        for language, counts in manifest[name]["languages"].items():
            sums[language].update(counts)
    whole = sum(total[counted] for total in sums.values())
    for language, total in sorted(sums.items(), key=lambda item: -item[1][counted]):
        parts = [chosen[language]] if chosen else []
        shares = [f"{part['share']:.2%}{'*' if part['exhausted'] else ' '}" for part in parts]
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
    table = _table("Sequences", "split", "docs", "plain", "PSM", "SPM", "sequences", "tokens", "filled")
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
    listed = {"read": rows} | {f"dropped: {reason}": count for reason, count in manifest["drops"].items()}
    listed["not chosen"] = counts.get("not chosen", 0)
    listed["kept"] = counts.get("documents", 0)
    listed["kept, with control pieces encoded as text"] = counts.get("documents with control pieces", 0)
    for name, count in listed.items():
        if count or name in ("read", "kept"):
            table.add_row(name, f"{count:,}", f"{count / max(1, rows):.2%}")
    return table


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


TitledLines = tuple[str, list[Text]]  # lines under a title


def main(config: InspectConfig) -> None:
    """Print everything; with html, write the same as a page."""
    manifest = read_manifest(config.out, "shards", "out")
    file = file_to_write("out", str(Path(config.out) / PAGE)) if config.inspect.html else None
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
    for title, lines in sections:
        console.rule(title, align="left")
        for line in lines:
            console.print(line, soft_wrap=False)
    if file:
        write_page(file, sections, ngrams, shards, manifest)
        console.print(f"inspect: wrote {file}")


def _sections(
    show: ShowConfig, shards: Shards, languages: list[str], vocab: Vocab, encoder: Encoder
) -> Iterator[TitledLines]:
    """Yield sequences drawn at random, each with what span replacement will do to its start."""
    if not 0 <= show.sequences <= len(shards):
        raise UserError(f"inspect.sequences must be at most the {len(shards)} there are, got {show.sequences}")
    random = generator(show.seed, "inspect")
    for index in sorted(random.choice(len(shards), size=show.sequences, replace=False).tolist()):
        sequence = shards[index]
        lines = list(sequence_lines(sequence, languages, vocab, encoder, show.characters))
        yield f"{show.split} sequence {index} of {len(shards)}: {sequence.used:,} tokens", lines
        tokens = sequence.tokens[: min(sequence.used, REPLACED_TOKENS)]
        documents = sequence.documents[None, : len(tokens)]
        may = replaceable(tokens[None], documents, sorted(vocab.control))[0]
        starts, widths = sample_windows(len(tokens), L=show.L, start_rate=show.start_rate, generator=random)
        offsets = window_offsets(starts, widths, may)
        lines = [replacement_line(tokens, offsets, vocab, encoder)]
        yield f"span replacement, L={show.L}: its first {len(tokens)} tokens", lines


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


SEQUENCES = 20_000  # at most, in the histograms
MARKS = {SENTINEL: "sentinel", ADAPTIVE: "adaptive", REPLACED: "replaced", HEADING: "heading", CUT: "cut"}
LEGEND = {
    "sentinel": "control token",
    "adaptive": "adaptive token: aN is the Nth of its window",
    "replaced": "token in its place before",
    "cut": "left out here",
}
MODES = ("blue", "orange", "green")  # of the histogram's bars
COLOURS = {"sentinel": ("#ddf4ff", "#0b3a5c"), "adaptive": ("#fbe0f3", "#5c2450")}  # light and dark
STYLE = f"""{variables(COLOURS)}
.sentinel {{ background: var(--sentinel); font-weight: 600; }}
.adaptive {{ background: var(--adaptive); font-weight: 600; }}
.replaced {{ color: var(--faint); text-decoration: line-through; }}
.heading {{ color: var(--good); font-weight: 600; }}
.cut {{ color: var(--faint); font-style: italic; }}
"""


def write_page(
    path: Path,
    sections: Iterable[TitledLines],
    ngrams: Iterable[Text],
    shards: Shards,
    manifest: dict[str, Any],
) -> None:
    """Write the page; a reader sees the whole of it or none."""
    body = [
        f"<header><h1>Data, as training reads it</h1><p>{manifest['train']['sequences']:,} sequences of "
        f"{manifest['seq_len']:,} tokens.</p></header>",
        *(_table_markup(table) for table in (languages(manifest), splits(manifest), drops(manifest))),
        _histograms(shards, manifest),
    ]
    if "ngrams" in manifest:
        lines = "\n".join(map(_markup, ngrams))
        body.append(f"<h2>N-grams</h2><p>{escape(describe_ngrams(manifest['ngrams']))}</p><pre>{lines}</pre>")
    legend = "".join(f'<span><b class="{kind}">{kind}</b> {text}</span>' for kind, text in LEGEND.items())
    body.append(f'<h2>Sequences</h2><p class="lines">{legend}</p>')
    for title, texts in sections:
        lines = "\n".join(map(_markup, texts)).strip()
        body.append(f'<section><h3>{escape(pictures(title))}</h3><pre tabindex="0">{lines}</pre></section>')
    text = page("Data of adaptive-tokens", "\n".join(body), style=STYLE)
    write_bytes(path, text.encode("utf-8", "replace"))


def _markup(text: Text) -> str:
    """Return coloured text as HTML; its styles are those of data_prep.inspect, one at a place."""
    plain, parts, at = pictures(text.plain), [], 0
    spans = [(span.start, span.end, span.style) for span in text.spans]
    for start, end, style in [(0, len(plain), text.style)] if text.style else spans:
        parts.append(escape(plain[at:start]))
        parts.append(f'<span class="{MARKS[str(style)]}">{escape(plain[start:end])}</span>')
        at = end
    return "".join([*parts, escape(plain[at:])])


def _table_markup(table: Table) -> str:
    """Return a table of texts as HTML."""
    columns: Sequence[Any] = table.columns
    head = "".join(f'<th scope="col">{escape(str(column.header))}</th>' for column in columns)
    rows = []
    for first, *others in zip(*(column.cells for column in columns)):
        cells = "".join(f"<td>{escape(pictures(str(cell)))}</td>" for cell in others)
        rows.append(f'<tr><th scope="row">{escape(pictures(str(first)))}</th>{cells}</tr>')
    note = f'<p class="faint">{escape(str(table.caption))}</p>' if table.caption else ""
    return (
        f'<div class="wide" tabindex="0"><table><caption>{escape(str(table.title))}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _histograms(shards: Shards, manifest: Mapping[str, Any]) -> str:
    """Return plots of documents' lengths by mode, of documents by sequence, and of languages."""
    from matplotlib.figure import Figure  # late: it takes its time
    from matplotlib.ticker import MaxNLocator

    def subplots(title: str, height: float) -> tuple[Figure, Any]:
        figure = Figure(figsize=(4.3, height), layout="constrained")
        axis = figure.subplots()
        axis.set_title(title)
        return figure, axis

    spans = [shards[index].spans for index in range(min(SEQUENCES, len(shards)))]
    if not spans:
        return ""
    markup = []
    with plot_style():
        figure, axis = subplots("Lengths by mode", 2.7)
        every = np.concatenate(spans)
        lengths = every["stop"].astype(np.int64) - every["start"]
        bins = np.geomspace(max(1, lengths.min()), lengths.max() + 1, 40).tolist()
        by_mode = [lengths[every["mode"] == mode] for mode in Mode]
        axis.hist(by_mode, bins=bins, stacked=True, color=[LIGHT[color] for color in MODES])
        axis.set(xscale="log", xlabel="tokens", ylabel="documents, or their parts")
        markup.append(inline_svg(figure, "Lengths by mode"))

        figure, axis = subplots("Documents per sequence", 2.7)
        counts = np.array([len(own) for own in spans])
        bins = np.arange(0.5, counts.max() + 1.5, max(1, counts.max() // 40)).tolist()
        axis.hist(counts, bins=bins, color=LIGHT["blue"])
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(xlabel="documents", ylabel="sequences")
        markup.append(inline_svg(figure, "Documents per sequence"))

        sizes = {name: sums["tokens"] for name, sums in manifest["train"]["languages"].items()}
        largest = sorted(sizes.items(), key=lambda item: item[1])[-25:]
        figure, axis = subplots("Languages", 1.2 + 0.22 * len(largest))
        shares = [size / sum(sizes.values()) for _, size in largest]
        axis.barh(range(len(largest)), shares, 0.7, color=LIGHT["blue"])
        axis.set_yticks(range(len(largest)), [label(name) for name, _ in largest])
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        axis.xaxis.set_major_formatter("{x:.0%}")
        axis.set_xlabel("share of training tokens")
        axis.grid(visible=False, axis="y")
        markup.append(inline_svg(figure, "Languages"))
    keys = "".join(
        f'<span><svg viewBox="0 0 28 10" aria-hidden="true"><rect width="28" height="10" '
        f'fill="var(--{color})"/></svg>{mode.name}</span>'
        for mode, color in zip(Mode, MODES)
    )
    return f'<figure><div class="lines">{keys}</div><div class="panels">{"".join(markup)}</div></figure>'


if __name__ == "__main__":
    run("inspect", InspectConfig, main)
