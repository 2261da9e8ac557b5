"""A data folder as one HTML page in the style of the report: tables, histograms, sequences with a legend."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from rich.text import Text

from conf.characters import label, pictures
from conf.files import write_bytes
from conf.html import LIGHT, inline_svg, page, plot_style, variables
from data_prep.encode.fim import Mode
from data_prep.inspect.show import ADAPTIVE, CUT, HEADING, REPLACED, SENTINEL, Section
from data_prep.shards import Shards
from data_prep.tables import describe_ngrams, drops, languages, splits

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
    path: Path, sections: Iterable[Section], ngrams: Iterable[Text], shards: Shards, manifest: dict[str, Any]
) -> None:
    """Write the page; a reader sees the whole of it or none."""
    body = [
        f"<header><h1>Data, as training reads it</h1><p>{manifest['train']['sequences']:,} sequences of "
        f"{manifest['seq_len']:,} tokens.</p></header>",
        *(_table(table) for table in (languages(manifest), splits(manifest), drops(manifest))),
        _histograms(shards, manifest),
    ]
    if "ngrams" in manifest:
        lines = "\n".join(_markup(line) for line in ngrams)
        body.append(f"<h2>N-grams</h2><p>{escape(describe_ngrams(manifest['ngrams']))}</p><pre>{lines}</pre>")
    legend = "".join(f'<span><b class="{kind}">{kind}</b> {text}</span>' for kind, text in LEGEND.items())
    body.append(f'<h2>Sequences</h2><p class="lines">{legend}</p>')
    for section in sections:
        lines = "\n".join(_markup(line) for line in section.lines)
        title = escape(pictures(section.title))
        body.append(f'<section><h3>{title}</h3><pre tabindex="0">{lines.strip()}</pre></section>')
    text = page("Data of adaptive-tokens", "\n".join(body), style=STYLE)
    write_bytes(path, text.encode("utf-8", "replace"))


def _markup(text: Text) -> str:
    """Return coloured text as HTML; its styles are those of show.py, one at a place."""
    plain, parts, at = pictures(text.plain), [], 0
    spans = (
        [(0, len(plain), text.style)]
        if text.style
        else [(span.start, span.end, span.style) for span in text.spans]
    )
    for start, end, style in spans:
        parts.append(escape(plain[at:start]))
        parts.append(f'<span class="{MARKS[str(style)]}">{escape(plain[start:end])}</span>')
        at = end
    return "".join([*parts, escape(plain[at:])])


def _table(table: Table) -> str:
    """Return a table of texts as HTML."""
    columns: Sequence[Any] = table.columns
    head = "".join(f'<th scope="col">{escape(str(column.header))}</th>' for column in columns)
    rows = [
        "".join(
            f"<td>{escape(pictures(str(cell)))}</td>"
            if at
            else f'<th scope="row">{escape(pictures(str(cell)))}</th>'
            for at, cell in enumerate(cells)
        )
        for cells in zip(*(column.cells for column in columns))
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note = f'<p class="faint">{escape(str(table.caption))}</p>' if table.caption else ""
    return (
        f'<div class="wide" tabindex="0"><table><caption>{escape(str(table.title))}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
    )


def _histograms(shards: Shards, manifest: Mapping[str, Any]) -> str:
    """Lengths of documents by mode, documents of a sequence, languages."""
    spans = [shards[index].spans for index in range(min(SEQUENCES, len(shards)))]
    if not spans:
        return ""
    every = np.concatenate(spans)
    lengths = every["stop"].astype(np.int64) - every["start"]
    sizes = {name: sums["tokens"] for name, sums in manifest["train"]["languages"].items()}
    largest = sorted(sizes.items(), key=lambda item: item[1])[-25:]
    drawn: list[tuple[str, Callable[[Axes], None], float]] = [
        ("Lengths by mode", partial(_lengths, lengths=lengths, modes=every["mode"]), 2.7),
        ("Documents per sequence", partial(_counts, counts=np.array([len(own) for own in spans])), 2.7),
        (
            "Languages",
            partial(_languages, largest=largest, whole=sum(sizes.values())),
            1.2 + 0.22 * len(largest),
        ),
    ]
    markup = []
    for title, draw, height in drawn:
        with plot_style():
            figure = Figure(figsize=(4.3, height), layout="constrained")
            axis = figure.subplots()
            axis.set_title(title)
            draw(axis)
            markup.append(inline_svg(figure, title))
    keys = "".join(
        f'<span><svg viewBox="0 0 28 10" aria-hidden="true"><rect width="28" height="10" '
        f'fill="var(--{color})"/></svg>{mode.name}</span>'
        for mode, color in zip(Mode, MODES)
    )
    return f'<figure><div class="lines">{keys}</div><div class="panels">{"".join(markup)}</div></figure>'


def _lengths(axis: Axes, lengths: np.ndarray, modes: np.ndarray) -> None:
    bins = np.geomspace(max(1, lengths.min()), lengths.max() + 1, 40).tolist()
    by_mode = [lengths[modes == mode] for mode in Mode]
    axis.hist(by_mode, bins=bins, stacked=True, color=[LIGHT[color] for color in MODES])
    axis.set(xscale="log", xlabel="tokens", ylabel="documents, or their parts")


def _counts(axis: Axes, counts: np.ndarray) -> None:
    bins = np.arange(0.5, counts.max() + 1.5, max(1, counts.max() // 40))
    axis.hist(counts, bins=bins.tolist(), color=LIGHT["blue"])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="documents", ylabel="sequences")


def _languages(axis: Axes, largest: Sequence[tuple[str, int]], whole: int) -> None:
    axis.barh(range(len(largest)), [size / whole for _, size in largest], 0.7, color=LIGHT["blue"])
    axis.set_yticks(range(len(largest)), [label(name) for name, _ in largest])
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter("{x:.0%}")
    axis.set_xlabel("share of training tokens")
    axis.grid(visible=False, axis="y")
