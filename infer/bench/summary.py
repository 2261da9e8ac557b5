"""A report for a reader in a hurry: what is faster, by what, the same text, the same quality. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from infer.bench.marks import BUSY
from infer.bench.names import BASE, PEER, PLAIN
from infer.bench.statistics import grouped

FIGURES = {"tokens_per_forward": "number of tokens per forward", "speedup": "speedup"}
NARROW = ("bfloat16", "float16")  # where near-ties may differ
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A figure, its name, and what it is."""

    name: str
    figure: str
    note: str


@dataclass(frozen=True)
class Summary:
    """One sentence and four cells."""

    sentence: str
    cells: tuple[Cell, ...]


def summarize(report: Row) -> Summary | None:
    """Return the summary of the speed part; None if it or a drafting decoder is missing.

    It is about the lowest temperature and the decoder with the highest speedup, or on a busy
    machine with the most tokens per forward; of several prompt sets by the geometric mean.
    """
    if not report["speed"]:
        return None
    rows = report["speed"]["rows"]
    lowest = min(row["temperature"] for row in rows)
    own = [
        row
        for row in rows
        if row["temperature"] == lowest
        and not row["decoder"].startswith((PLAIN, BASE, PEER))
    ]
    if not own:
        return None
    busy = any(row["marks"] for row in own)
    figure = "tokens_per_forward" if busy else "speedup"
    decoders = dict(grouped(own, "decoder"))
    (name,), best = max(
        decoders.items(), key=lambda item: prod(row[figure] for row in item[1])
    )
    text = same_text(best, report["speed"]["settings"]["dtype"])
    cells = (
        Cell("faster", name, f"the highest {FIGURES[figure]} of the decoders"),
        gain(best, busy),
        text,
        same_quality(report, name),
    )
    return Summary(sentence(name, best, busy, text), cells)


def gain(rows: Sequence[Row], busy: bool) -> Cell:
    """Return the cell of tokens per forward, acceptance length and speedup."""
    lengths = [row["mean_acceptance_length"] for row in rows]
    known = [length for length in lengths if length is not None]
    facts = [f"mean acceptance length {span(known)}"] if known else []
    facts.append(f"{BUSY}: no speed is to be believed" if busy else times(rows))
    forward = span([row["tokens_per_forward"] for row in rows])
    return Cell("by", f"{forward} tokens per forward", "; ".join(facts))


def times(rows: Sequence[Row]) -> str:
    """Return the speedup in words, of a single prompt set with its interval."""
    text = f"{span([row['speedup'] for row in rows])} times as fast"
    if len(rows) == 1 and (ends := rows[0]["speedup_interval"]):
        text += f" (95 %: {ends[0]:.2f}–{ends[1]:.2f})"
    return text


def same_text(rows: Sequence[Row], dtype: str) -> Cell:
    """Return the cell of the texts that equal plain decoding's."""
    same, compared = (sum(row[name] for row in rows) for name in ("same", "compared"))
    note = "texts are plain decoding's, token for token"
    if same < compared and dtype in NARROW:
        note += f"; in {dtype} near-ties may differ"
    return Cell("same text", f"{same} of {compared}", note)


def same_quality(report: Row, decoder: str) -> Cell:
    """Return the cell of the scores after and before fine-tuning.

    A gated fine-tune leaves the standard weights as they were.
    """
    quality = report.get("quality")
    scores = []
    for (benchmark, metric), rows in grouped(
        quality["rows"] if quality else [], "benchmark", "metric"
    ):
        after = {row["decoder"]: row for row in rows if row["who"] == "model"}
        before = next((row for row in rows if row["who"] == "base"), None)
        row = after.get(decoder, after.get(PLAIN))
        if row and row["value"] is not None:
            score = f"{metric} of {benchmark} {100 * row['value']:.1f} %"
            if before and before["value"] is not None:
                score += f", before fine-tuning {100 * before['value']:.1f} %"
            scores.append(score)
    note = "; ".join(scores) or "no benchmark was run: part=quality"
    if report["speed"]["gated"]:
        return Cell("same quality", "the base's weights", note)
    return Cell("same quality", "measured" if scores else "not measured", note)


def sentence(name: str, rows: Sequence[Row], busy: bool, text: Cell) -> str:
    """Return what is faster by what, and how many texts are the same."""
    forward = span([row["tokens_per_forward"] for row in rows])
    sets = [row["prompt_set"] for row in rows]
    place = sets[0] if len(sets) == 1 else f"{len(sets)} prompt sets"
    if busy:
        begin = f"The machine was busy, only counts are to be believed: on {place} {name} makes"
    elif min(low_end(row) for row in rows) > 1:
        begin = f"{name} is {times(rows)} as plain decoding on {place}, with"
    else:
        begin = (
            f"Nothing is surely faster than plain decoding on {place}: {name} is "
            f"{times(rows)}, with"
        )
    return f"{begin} {forward} tokens per forward; {text.figure} texts are the same."


def low_end(row: Row) -> float:
    """Return the lower end of the speedup's interval, or the speedup."""
    ends = row["speedup_interval"]
    return float(ends[0] if ends else row["speedup"])


def span(values: Sequence[float]) -> str:
    """Format a figure of one prompt set, or the least and the greatest of several."""
    ends = [f"{value:.2f}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))
