"""A report on a terminal of 80 columns: a table for each prompt set and temperature, and the scores."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import mean
from textwrap import wrap
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
from infer.report.summary import sentence
from infer.report.tables import SOURCES_CAPTION, batch_table, compact_sources

Column = tuple[str, str]  # benchmark and language
WIDEST = 7  # columns of scores in 80 characters
PEER, OTHER = "†", "≠"
SPEED = ("tok/s", "speed-\nup", "95 %", "acc.", "len", "tok/\nfwd", "1st\nms", "limit", "same")


def print_report(report: Mapping[str, Any], kinds: Collection[str] = ("speed", "quality")) -> None:
    """Return what was measured of these kinds, what to beware of in all of it, and what it comes to."""
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
    sentences = {
        (entry["prompt_set"], entry["temperature"]): sentence(entry) for entry in report["summary"]["best"]
    }
    for (name, temperature), mine in groups(rows, "prompt_set", "temperature").items():
        counts = f"{mine[0]['prompts']} prompts, {mine[0]['rounds']} rounds"
        console.print(f"{name}, temperature {temperature:g}: {counts}")
        console.print(speed_table(mine))
        head, cells = compact_sources(mine)
        if cells:
            console.print(f"\n{SOURCES_CAPTION}")
            console.print(table_of(head, cells), "")
        if batches := groups(report["speed"]["batches"], "prompt_set", "temperature").get((name, temperature)):
            table = batch_table(batches)
            head = ["texts side by side", "plain tok/s", "sdsat tok/s", *table["head"][3:]]
            console.print(table_of(head, table["rows"]), "")
        nothing = "the texts were too short for drafts" if any(map(drafts, mine)) else ""
        console.print(sentences.get((name, temperature), nothing), "", sep="\n")
    for entry in report["speed"]["skipped"]:
        console.print(f"left out: {entry['prompt_set']}: {entry['reason']}")
    for entry in report["speed"]["left_out"]:
        console.print(f"left out: {entry['peer']}: {entry['reason']}")
    if any(row["decoder"] == "sdsat" for row in rows):
        console.print(FORWARD)
    if any(row["peer"] for row in rows):
        console.print(f"{PEER} a peer")
    if any(map(differs, rows)):
        console.print(f"{OTHER} not token-identical to plain decoding in every text")
    console.print()


def speed_table(rows: Sequence[Row]) -> Table:
    """Tabulate one row for each decoder, the dtypes apart."""
    table = table_of(("decoder", *SPEED))
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
        agree, compared = (sum(entry[name] for entry in part["same"]) for name in ("identical", "compared"))
        console.print(f"decoded with drafts, {agree} of {compared} answers are those of plain decoding")
    for entry in part["skipped"]:
        console.print(f"skipped: {task(entry)}: {entry['reason']}")
    if part.get("sandbox"):
        console.print(f"sandbox: {part['sandbox']['told']}")
    console.print()


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]] = (), *, padding: int = 0) -> Table:
    """Return a table whose first column is text and the others figures, `padding` spaces between them."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, padding))
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_scores(console: Console, quality: Mapping[str, Any]) -> None:
    """Print all scores and their differences, in the shape of the paper's tables 1 to 3."""
    for (metric, temperature), rows in groups(quality["rows"], "metric", "temperature").items():
        gaps = [
            gap
            for gap in quality["differences"]
            if (gap["metric"], gap["temperature"]) == (metric, temperature)
        ]
        same = [entry for entry in quality["same"] if entry["temperature"] == temperature]
        how = f"sampled at temperature {temperature:g}" if temperature else "greedy decoding"
        for columns in _column_groups(rows):
            by_language = len(columns) > 1 and len({benchmark for benchmark, _ in columns}) == 1
            title = f"{columns[0][0]}: " if by_language else ""
            heads = [name if kind in ("", "python") else f"{name} {kind}" for name, kind in columns]
            if by_language:
                heads = [*(language for _, language in columns), "average"]
            lines = _score_lines(columns, rows, gaps, same, average=by_language)
            for at in range(0, len(heads), WIDEST):
                table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
                table.add_column("", no_wrap=True)
                for head in heads[at : at + WIDEST]:
                    table.add_column(head, justify="right")
                for name, cells in lines.items():
                    table.add_row(name, *cells[at : at + WIDEST])
                console.print(f"{title}{metric} in %, {how}")
                console.print(table, "")


def _column(row: Row) -> Column:
    return row["benchmark"], row["language"]


def _column_groups(rows: Sequence[Row]) -> list[list[Column]]:
    """Return the columns of each table: benchmarks of one language together, the languages of others apart."""
    columns = [list(dict.fromkeys(map(_column, mine))) for mine in groups(rows, "benchmark").values()]
    single = [column for group in columns if len(group) == 1 for column in group]
    return [part for part in (single, *(group for group in columns if len(group) > 1)) if part]


def _score_lines(
    columns: Sequence[Column], rows: Sequence[Row], gaps: Sequence[Row], same: Sequence[Row], *, average: bool
) -> dict[str, list[str]]:
    """Return the cells of every line by its label; the interval of a difference stands below it."""
    models = groups(sorted(rows, key=lambda row: row["who"]), "who", "decoder").items()
    picked = {
        who + (f", {decoder}" if decoder != "plain" else ""): _pick(mine, columns)
        for (who, decoder), mine in models
    }
    lines = {name: _cells(scores, lambda row: row["value"], ".1f", average) for name, scores in picked.items()}
    if any(scores := _pick(gaps, columns)):
        lines["difference"] = _cells(scores, lambda row: row["value"], "+.1f", average)
        lines["  95 %: from"] = _cells(scores, lambda row: row["interval"][0], "+.1f")
        lines["  to"] = _cells(scores, lambda row: row["interval"][1], "+.1f")
    first = next(iter(picked.values()))
    lines["problems"] = ["" if row is None else str(row["problems"]) for row in first]
    if any(scores := _pick(same, columns)):
        lines["identical"] = _cells(scores, lambda row: row["identical"] / row["compared"], ".1f")
    return lines


def _pick(rows: Iterable[Row], columns: Sequence[Column]) -> list[Row | None]:
    by_column = {_column(row): row for row in rows}
    return [by_column.get(column) for column in columns]


def _cells(
    rows: Sequence[Row | None], value: Callable[[Row], float], form: str, average: bool = False
) -> list[str]:
    """Return cells in percent, and their mean where all are there."""
    cells = ["" if row is None else format(100 * value(row), form) for row in rows]
    if average:
        values = [value(row) for row in rows if row is not None]
        cells.append(format(100 * mean(values), form) if len(values) == len(rows) else "")
    return cells
