"""A report on a terminal of 80 columns: a table for each prompt set and temperature, and one of the quality."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from infer.report.rows import Row, differs, groups, label, number, percent, points, span, task
from infer.report.summary import sentence

PEER, OTHER = "†", "≠"
SPEED = ("tok/s", "speedup", "95 %", "acc.", "tok/\nfwd", "first\nms", "limit", "same")
QUALITY = ("metric", "temp.", "base", "model", "diff.", "95 %", "problems")


def print_report(report: Mapping[str, Any]) -> None:
    """All that was measured, and what to beware of."""
    console = Console(highlight=False, soft_wrap=False)
    if report["speed"]:
        _print_speed(console, report)
    if report["quality"]:
        _print_quality(console, report)
    for warning in report["warnings"]:
        console.print(f"warning: {warning}", markup=False)
    if report["summary"]["sentence"]:
        console.print(report["summary"]["sentence"], markup=False)


def _print_speed(console: Console, report: Mapping[str, Any]) -> None:
    rows, machine = report["speed"]["rows"], report["speed"]["hardware"]
    console.print(f"{machine['gpu'] or machine['cpu']}, {machine['threads']} thread(s)\n", markup=False)
    told = {(one["prompt_set"], one["temperature"]): sentence(one) for one in report["summary"]["best"]}
    for (name, temperature), mine in groups(rows, "prompt_set", "temperature").items():
        counts = f"{mine[0]['prompts']} prompts, {mine[0]['rounds']} rounds"
        console.print(f"{name}, temperature {temperature:g}: {counts}", markup=False)
        console.print(speed_table(mine))
        console.print(
            told.get((name, temperature), "the texts were too short for drafts"), "", markup=False, sep="\n"
        )
    if any(row["peer"] for row in rows):
        console.print(f"{PEER} a peer")
    if any(map(differs, rows)):
        console.print(f"{OTHER} not token-identical to plain decoding in every text")
    console.print()


def speed_table(rows: Sequence[Row]) -> Table:
    """One row for each decoder, the dtypes apart."""
    table = plain_table(("decoder", *SPEED))
    for dtype, mine in groups(rows, "dtype").items():
        table.add_row(f"[bold]{dtype[0]}[/bold]")
        for row in mine:
            same = f"{row['identical']}/{row['compared']}" if row["compared"] else ""
            table.add_row(
                f" {label(row)}" + (f" {PEER}" if row["peer"] else ""),
                number(row["tokens_per_second"], ".0f"),
                number(row["speedup"]),
                "" if row["decoder"] == "plain" else span(row["speedup_interval"]),
                percent(row["acceptance_rate"]),
                number(row["tokens_per_forward"]),
                number(row["first_ms"], ".3g" if (row["first_ms"] or 0) < 100 else ".0f"),
                percent(row["limit_share"]),
                f"{same} {OTHER}" if differs(row) else same,
            )
    return table


def _print_quality(console: Console, report: Mapping[str, Any]) -> None:
    part = report["quality"]
    console.print("Quality, decoded plainly", markup=False)
    console.print(_quality_table(report["summary"]["scores"]))
    if part["same"]:
        agree, asked = (sum(one[name] for one in part["same"]) for name in ("identical", "compared"))
        console.print(f"decoded with drafts, {agree} of {asked} answers are those of plain decoding")
    for one in part["skipped"]:
        console.print(f"skipped: {task(one)}: {one['reason']}", markup=False)
    if part.get("sandbox"):
        console.print(part["sandbox"]["told"], markup=False)
    console.print()


def _quality_table(scores: Sequence[Row]) -> Table:
    table = plain_table(("benchmark", *QUALITY))
    for score in scores:
        table.add_row(
            task(score),
            score["metric"],
            f"{score['temperature']:g}",
            percent(score["base"], 1),
            percent(score["model"], 1),
            points(score["difference"]),
            " to ".join(map(points, score["interval"] or ())),
            str(score["problems"]),
        )
    return table


def plain_table(columns: Sequence[str]) -> Table:
    """A table whose first column is text, and the others figures, as narrow as they can be."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table
