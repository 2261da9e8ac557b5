"""A report on a terminal of 80 columns: the tables that its page has, in the columns that fit."""

from collections.abc import Collection, Mapping
from textwrap import wrap
from typing import Any

from rich import box
from rich import table as rich_table
from rich.console import Console

from conf.console import PlainConsole
from infer.report.rows import FORWARD, GATED, SOURCES, differs, task
from infer.report.tables import Table, quality_tables, speed_sets

MARKS = {"peer": "†", "differs": "≠"}
SPEED = {  # columns, and their heads here
    "tokens/s": "tok/s",
    "speedup": "speed-\nup",
    "95 %": "95 %",
    "accepted": "acc.",
    "mean\nlength": "len",
    "tokens by\nforward": "tok/\nfwd",
    "first token, ms": "1st\nms",
    "share of the limit": "limit",
    "identical\ntexts": "same",
}
PLACES = {name: name for name in (*SOURCES.values(), *map(str, (1, 2, 3, 4, 6, 8, 12, 16)))}


def print_table(console: Console, table: Table) -> None:
    """Print a table with its title. Columns that the console has no room for follow, beside the same names."""
    if table.title:
        console.print(table.title)
    names = [
        " ".join([line.name, *(MARKS[mark] for mark in line.marks if mark in MARKS)]) for line in table.lines
    ]
    columns = list(zip(table.head[1:], *(line.cells for line in table.lines)))
    wide = console.options.update(max_width=10**4)
    while columns:
        for count in range(len(columns), 0, -1):
            part = rich_table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
            part.add_column(table.head[0], no_wrap=True)
            for head, *_ in columns[:count]:
                part.add_column(head, justify="right", no_wrap=True)
            for row, name in enumerate(names):
                part.add_row(name, *(cells[row] for _, *cells in columns[:count]))
            if console.measure(part, options=wide).maximum <= console.width:
                break
        console.print(part, "")
        columns = columns[count:]


def print_report(report: Mapping[str, Any], kinds: Collection[str] = ("speed", "quality")) -> None:
    """Print what was measured of these kinds, what to beware of in all of it, and what it comes to."""
    console = PlainConsole(soft_wrap=False)
    if report["speed"] and "speed" in kinds:
        _print_speed(console, report)
    if report["quality"] and "quality" in kinds:
        _print_quality(console, report["quality"])
    for warning in report["warnings"]:
        lines = wrap(f"warning: {warning}", console.width, break_long_words=False, break_on_hyphens=False)
        console.print("\n".join(lines), soft_wrap=True)  # a long path stays whole
    if report["summary"]["sentence"]:
        console.print(report["summary"]["sentence"])


def _print_speed(console: Console, report: Mapping[str, Any]) -> None:
    rows, machine = report["speed"]["rows"], report["speed"]["hardware"]
    console.print(f"{machine['gpu'] or machine['cpu']}, {machine['threads']} thread(s)")
    console.print(*([GATED] if report["speed"].get("gated") else []), "", sep="\n")
    for prompt_set in speed_sets(report):
        console.print(f"{prompt_set.name}: {prompt_set.counts}\n")
        for tables in prompt_set.tables:
            print_table(console, tables.figures.columns(SPEED))
            if tables.sources:
                print_table(console, tables.sources.columns(PLACES))
        if prompt_set.batches:
            print_table(console, prompt_set.batches)
        console.print(*prompt_set.sentences, "", sep="\n")
    for entry in report["speed"]["skipped"]:
        console.print(f"left out: {entry['prompt_set']}: {entry['reason']}")
    for entry in report["speed"]["left_out"]:
        console.print(f"left out: {entry['peer']}: {entry['reason']}")
    if any(row["decoder"] == "sdsat" for row in rows):
        console.print(FORWARD)
    if any(row["peer"] for row in rows):
        console.print(f"{MARKS['peer']} a peer")
    if any(map(differs, rows)):
        console.print(f"{MARKS['differs']} not token-identical to plain decoding in every text")
    console.print()


def _print_quality(console: Console, part: Mapping[str, Any]) -> None:
    settings, machine = part["settings"], part["hardware"]
    place = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} thread(s)"
    console.print(f"quality in {settings['dtype']} on {place}; 95 % intervals are below their figures\n")
    for table in quality_tables(part):
        print_table(console, table)
    for entry in part["skipped"]:
        console.print(f"skipped: {task(entry)}: {entry['reason']}")
    if part.get("sandbox"):
        console.print(f"sandbox: {part['sandbox']['told']}")
    console.print()
