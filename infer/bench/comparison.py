"""Tables that compare several reports. Each row or column names its report. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from infer.bench.names import PLAIN, PLAIN_AGAIN
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
SCORE_HEADS = ("benchmark", "metric", "decoder")


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


def score_tables(reports: Mapping[str, Any]) -> Iterator[Table]:
    """Yield one table of scores in %, or no table without scores.

    It has a row for each benchmark and decoder, and a column for each model. A report with a
    base has two columns.
    """
    rows = rows_of(reports, "quality")
    models = [name for (name,), _ in grouped(rows, "column")]
    cells = []
    for key, group in grouped(rows, "benchmark", "metric", "decoder"):
        scores = {row["column"]: number(row["value"], 1, 100) for row in group}
        cells.append([*key, *(scores.get(name, "") for name in models)])
    if cells:
        heads = (*SCORE_HEADS, *models)
        yield Table("scores (%)", heads, cells, names=len(SCORE_HEADS))


def rows_of(reports: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    """Return the rows of all reports, each with the names of its `report` and its `column`."""
    rows = []
    for name, report in reports.items():
        for row in report[part]["rows"] if report[part] else ():
            column = name if row.get("who", "model") == "model" else f"{name}: base"
            rows.append({**row, "report": name, "column": column})
    return rows
