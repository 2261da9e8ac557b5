"""A report on a terminal of 80 columns: a table for each prompt set and temperature, and the scores."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conf.console import PlainConsole
from infer.report.rows import (
    FORWARD,
    GATED,
    Row,
    differs,
    drafts,
    groups,
    label,
    number,
    percent,
    same,
    span,
    task,
)
from infer.report.sources import CAPTION, compact_table
from infer.report.summary import sentence
from infer.report.terminal_quality import print_scores

PEER, OTHER = "†", "≠"
SPEED = ("tok/s", "speed-\nup", "95 %", "acc.", "len", "tok/\nfwd", "1st\nms", "limit", "same")


def print_report(report: Mapping[str, Any], kinds: Collection[str] = ("speed", "quality")) -> None:
    """What was measured of these kinds, what to beware of in all of it, and what it comes to."""
    console = PlainConsole(soft_wrap=False)
    if report["speed"] and "speed" in kinds:
        _print_speed(console, report)
    if report["quality"] and "quality" in kinds:
        _print_quality(console, report["quality"])
    for warning in report["warnings"]:
        console.print(f"warning: {warning}")
    if report["summary"]["sentence"]:
        console.print(report["summary"]["sentence"])


def _print_speed(console: Console, report: Mapping[str, Any]) -> None:
    rows, machine = report["speed"]["rows"], report["speed"]["hardware"]
    console.print(f"{machine['gpu'] or machine['cpu']}, {machine['threads']} thread(s)")
    console.print(*([GATED] if report["speed"].get("gated") else []), "", sep="\n")
    told = {(one["prompt_set"], one["temperature"]): sentence(one) for one in report["summary"]["best"]}
    for (name, temperature), mine in groups(rows, "prompt_set", "temperature").items():
        counts = f"{mine[0]['prompts']} prompts, {mine[0]['rounds']} rounds"
        console.print(f"{name}, temperature {temperature:g}: {counts}")
        console.print(speed_table(mine))
        _print_sources(console, mine)
        nothing = "the texts were too short for drafts" if any(map(drafts, mine)) else ""
        console.print(told.get((name, temperature), nothing), "", sep="\n")
    for one in report["speed"]["skipped"]:
        console.print(f"left out: {one['prompt_set']}: {one['reason']}")
    for one in report["speed"]["left_out"]:
        console.print(f"left out: {one['peer']}: {one['reason']}")
    if any(row["decoder"] == "sdsat" for row in rows):
        console.print(FORWARD)
    if any(row["peer"] for row in rows):
        console.print(f"{PEER} a peer")
    if any(map(differs, rows)):
        console.print(f"{OTHER} not token-identical to plain decoding in every text")
    console.print()


def _print_sources(console: Console, rows: Sequence[Row]) -> None:
    head, cells = compact_table(rows)
    if not cells:
        return
    console.print(f"\n{CAPTION}")
    table = plain_table(head)
    for row in cells:
        table.add_row(*row)
    console.print(table)
    console.print()


def speed_table(rows: Sequence[Row]) -> Table:
    """One row for each decoder, the dtypes apart."""
    table = plain_table(("decoder", *SPEED))
    for dtype, mine in groups(rows, "dtype").items():
        table.add_row(Text(dtype[0], "bold"))
        for row in mine:
            table.add_row(
                label(row) + (f" {PEER}" if row["peer"] else ""),
                number(row["tokens_per_second"], ".0f"),
                number(row["speedup"]),
                "" if row["decoder"] == "plain" else span(row["speedup_interval"]),
                percent(row["acceptance_rate"]),
                number(row["mean_acceptance_length"]),
                number(row["tokens_per_forward"]),
                number(row["first_ms"], ".3g" if (row["first_ms"] or 0) < 100 else ".0f"),
                percent(row["limit_share"]),
                f"{same(row)}{OTHER}" if differs(row) else same(row),
            )
    return table


def _print_quality(console: Console, part: Mapping[str, Any]) -> None:
    settings, machine = part["settings"], part["hardware"]
    place = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} thread(s)"
    console.print(f"quality in {settings['dtype']} on {place}\n")
    print_scores(console, part)
    if part["same"]:
        agree, asked = (sum(one[name] for one in part["same"]) for name in ("identical", "compared"))
        console.print(f"decoded with drafts, {agree} of {asked} answers are those of plain decoding")
    for one in part["skipped"]:
        console.print(f"skipped: {task(one)}: {one['reason']}")
    if part.get("sandbox"):
        console.print(f"sandbox: {part['sandbox']['told']}")
    console.print()


def plain_table(columns: Sequence[str]) -> Table:
    """A table whose first column is text, and the others figures, as narrow as they can be."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table
