"""Summarize a report: the fastest decoder, its speedup, equal texts, and quality. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from conf.pages import Cell
from infer.bench.marks import BUSY
from infer.bench.names import BASE, LOSS, PEER, PLAIN
from infer.bench.statistics import Report, Row, grouped

FIGURES = {
    "tokens_per_forward": "the most tokens per forward",
    "speedup": "the highest speedup",
}
NARROW = ("bfloat16", "float16")  # types with possible differences at near-ties


@dataclass(frozen=True)
class Summary:
    """The summary of a report: one sentence and four cells."""

    sentence: str
    cells: tuple[Cell, ...]


def summarize(report: Report) -> Summary | None:
    """Return the summary of part=speed; None without that part or a drafting decoder.

    It describes the lowest temperature and the decoder with the highest speedup, or on a busy
    machine the decoder with the most tokens per forward. Several prompt sets are combined by
    their geometric mean.
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
        Cell("best decoder", name, f"{FIGURES[figure]} of the drafting decoders"),
        gain(best, busy),
        text,
        same_quality(report, name),
    )
    return Summary(sentence(name, best, busy, text), cells)


def gain(rows: Sequence[Row], busy: bool) -> Cell:
    """Return the cell with tokens per forward, acceptance length and speedup."""
    lengths = [row["mean_acceptance_length"] for row in rows]
    known = [length for length in lengths if length is not None]
    facts = [f"mean acceptance length {span(known)}"] if known else []
    facts.append(f"{BUSY}: speeds are not reliable" if busy else times(rows))
    forward = span([row["tokens_per_forward"] for row in rows])
    return Cell("tokens per forward", forward, "; ".join(facts))


def times(rows: Sequence[Row]) -> str:
    """Format the speedup, such as "1.50 times as fast"; for a single prompt set with its interval."""
    text = f"{span([row['speedup'] for row in rows])} times as fast"
    if len(rows) == 1 and (ends := rows[0]["speedup_interval"]):
        text += f" (95 %: {ends[0]:.2f}–{ends[1]:.2f})"
    return text


def same_text(rows: Sequence[Row], dtype: str) -> Cell:
    """Return the cell with the number of texts that equal plain decoding's."""
    same, compared = (sum(row[name] for row in rows) for name in ("same", "compared"))
    note = "texts that equal plain decoding's, token for token"
    if same < compared and dtype in NARROW:
        note += f"; in {dtype} near-ties may differ"
    return Cell("equal texts", f"{same} of {compared}", note)


def same_quality(report: Report, decoder: str) -> Cell:
    """Return the cell with the scores after and before fine-tuning.

    A gated adapter does not change the weights of the base model.
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
            score = f"{metric} of {benchmark} {value_of(row)}"
            if before and before["value"] is not None:
                score += f", before fine-tuning {value_of(before)}"
            scores.append(score)
    note = "; ".join(scores) or "no benchmark was run: add part=quality"
    if report["speed"]["gated"]:
        return Cell("quality", "unchanged base model", note)
    return Cell("quality", "measured" if scores else "not measured", note)


def value_of(row: Row) -> str:
    """Format the value of a row of part=quality with its unit."""
    if row["metric"] == LOSS:
        return f"{row['value']:.3f} nats"
    return f"{100 * row['value']:.1f} %"


def sentence(name: str, rows: Sequence[Row], busy: bool, text: Cell) -> str:
    """Return a sentence with the decoder, its speedup, and the number of equal texts."""
    forward = span([row["tokens_per_forward"] for row in rows])
    sets = [row["prompt_set"] for row in rows]
    prompts = sets[0] if len(sets) == 1 else f"{len(sets)} prompt sets"
    if busy:
        begin = f"The machine was busy, so only counts are reliable: on {prompts} {name} has"
    elif min(low_end(row) for row in rows) > 1:
        begin = f"{name} is {times(rows)} as plain decoding on {prompts}, with"
    else:
        begin = (
            f"{name} is not significantly faster than plain decoding on {prompts}: it is "
            f"{times(rows)}, with"
        )
    return f"{begin} {forward} tokens per forward; {text.figure} texts are the same."


def low_end(row: Row) -> float:
    """Return the lower end of the speedup's interval, or the speedup."""
    ends = row["speedup_interval"]
    return float(ends[0] if ends else row["speedup"])


def span(values: Sequence[float]) -> str:
    """Format the figure of one prompt set, or the smallest and the largest of several."""
    ends = [f"{value:.2f}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))
