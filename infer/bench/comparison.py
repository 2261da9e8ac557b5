"""Tables that compare several reports. Each row or column names its report. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from infer.bench.marks import UNRELIABLE
from infer.bench.names import LOSS, PLAIN, PLAIN_AGAIN
from infer.bench.statistics import grouped
from infer.bench.tables import (
    Table,
    interval,
    marked,
    number,
    same,
    sampling,
    speedup,
)

SPEED_HEADS = (
    "model",
    "decoder",
    "tok/\nfwd",
    "length",
    "speed-\nup",
    "95 %",
    "tok/s",
    "same",
)
MODEL_HEADS = ("prompts", "figure", "decoder")


def prompt_warnings(reports: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each prompt set and benchmark with other prompts in another report.

    Reports of earlier versions do not record their prompts and are left out.
    """
    for part in ("speed", "quality"):
        contents: dict[str, dict[str, list[str]]] = {}
        for name, report in reports.items():
            for prompt_set, digest in (report[part] or {}).get("content", {}).items():
                names = contents.setdefault(prompt_set, {}).setdefault(digest, [])
                names.append(name)
        for prompt_set, by_digest in contents.items():
            if len(by_digest) > 1:
                groups = " / ".join(map(", ".join, by_digest.values()))
                yield (
                    f"warning: {prompt_set} has different prompts in these reports, so do not compare "
                    f"their figures: {groups}. Measure them with the same files, count and seed."
                )


def mark_notes(reports: Mapping[str, Any]) -> Iterator[str]:
    """Yield what question marks mean, if a speed in a table has one."""
    if any(row["marks"] for row in rows_of(reports, "speed")):
        yield f"?: {UNRELIABLE}. Measure again."


def speed_tables(reports: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table for each prompt set and temperature, with the decoders of each report."""
    rows = rows_of(reports, "speed")
    rows = [row for row in rows if row["decoder"] != PLAIN_AGAIN]
    for (prompt_set, temperature), group in grouped(rows, "prompt_set", "temperature"):
        cells = []
        for (name,), own in grouped(group, "report"):
            names = [name, *[""] * (len(own) - 1)]
            cells += [[first, *speed_cells(row)] for first, row in zip(names, own)]
        title = f"{prompt_set}, {sampling(temperature)}"
        yield Table(title, SPEED_HEADS, cells, names=2)


def speed_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row after the name of its model."""
    rate = row["output_tokens_per_second"]
    ends = None if row["decoder"] == PLAIN else row["speedup_interval"]
    return [
        row["decoder"],
        number(row["tokens_per_forward"]),
        number(row["mean_acceptance_length"]),
        speedup(row),
        interval(ends),
        marked(f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}", row),
        same(row),
    ]


def model_tables(reports: Mapping[str, Any]) -> Iterator[Table]:
    """Yield one table with a column for each model, or no table without scores and losses.

    The rows are scores, losses of documents, and mean acceptance lengths at the lowest
    temperature. A report with a base has two columns.
    """
    rows = [*quality_figures(reports)]
    if rows:
        rows += acceptance_figures(reports)
    models = [name for (name,), _ in grouped(rows, "column")]
    cells = []
    for key, group in grouped(rows, *MODEL_HEADS):
        figures = {row["column"]: row["text"] for row in group}
        cells.append([*key, *(figures.get(name, "") for name in models)])
    if cells:
        heads = (*MODEL_HEADS, *models)
        yield Table("all models", heads, cells, names=len(MODEL_HEADS))


def quality_figures(reports: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the cells of scores and losses."""
    for row in rows_of(reports, "quality"):
        loss = row["metric"] == LOSS
        unit = "nats a token" if loss else "%"
        yield {
            "prompts": row["benchmark"],
            "figure": f"{row['metric']}, {unit}",
            "decoder": "" if loss else row["decoder"],
            "column": row["column"],
            "text": number(row["value"], 3) if loss else number(row["value"], 1, 100),
        }


def acceptance_figures(reports: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the cells of the mean acceptance lengths at the lowest temperature."""
    rows = rows_of(reports, "speed")
    lowest = min((row["temperature"] for row in rows), default=0)
    for row in rows:
        length = row["mean_acceptance_length"]
        if row["temperature"] == lowest and length is not None:
            yield {
                "prompts": row["prompt_set"],
                "figure": f"acceptance length, {sampling(lowest)}",
                "decoder": row["decoder"],
                "column": row["column"],
                "text": number(length),
            }


def rows_of(reports: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    """Return the rows of all reports, each with the names of its `report` and its `column`."""
    rows = []
    for name, report in reports.items():
        for row in report[part]["rows"] if report[part] else ():
            column = name if row.get("who", "model") == "model" else f"{name}: base"
            rows.append({**row, "report": name, "column": column})
    return rows
