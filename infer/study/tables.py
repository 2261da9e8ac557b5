"""The study on a terminal: a table for each part, as in the paper."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from conf.console import PlainConsole

Row = Mapping[str, Any]


def print_study(report: Mapping[str, Any]) -> None:
    """Print all parts that were measured."""
    console, machine, settings = PlainConsole(), report["hardware"], report["settings"]
    console.print(
        f"{settings['draft']['model']} drafts for {settings['model']} in {settings['dtype']} on "
        f"{machine['gpu'] or machine['cpu']}, {machine['threads']} thread(s), {report['date']}\n"
    )
    for part, (title, columns) in TABLES.items():
        rows = report.get(part, [])
        for name in dict.fromkeys(row.get("prompt_set", "") for row in rows):
            console.print(f"{title}{name and f', {name}'}")
            console.print(_table(columns, [row for row in rows if row.get("prompt_set", "") == name]), "")


def _table(columns: Mapping[str, Callable[[Row], str]], rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cells(row) for cells in columns.values()))
    return table


def _number(name: str, form: str) -> Callable[[Row], str]:
    """Return a figure of the row; nothing where there is none."""
    return lambda row: "" if row[name] is None else format(row[name], form)


def _way(row: Row) -> str:
    parts = (row["decoding"], row["method"], row["budget"], row["verify"])
    return " ".join(part for part in parts if part not in (None, "fixed", "pick"))


def _rank(rank: int) -> Callable[[Row], str]:
    return lambda row: "" if row["shares"] is None else f"{row['shares'][rank - 1]:.3f}"


METHODS = {
    "": _way,
    "accept": _number("acceptance_rate", ".3f"),
    "share": _number("drafted_share", ".3f"),
    "drafted": _number("drafted_per_token", ".1f"),
    "fed": _number("fed_per_token", ".1f"),
    "success": _number("graph_success", ".1%"),
    "speedup": _number("speedup", ".2f"),
    "same": lambda row: f"{row['identical']}/{row['prompts']}",
}
TABLES: dict[str, tuple[str, Mapping[str, Callable[[Row], str]]]] = {
    "methods": (
        "Methods; accept is by level drafted, share of the text; drafted and fed are by token (Table 1)",
        METHODS,
    ),
    "sampling": ("Keyed draws and verification by ratio (Table 2)", METHODS),
    "time": (
        "Milliseconds of a step (Table 3)",
        {
            "": lambda row: f"{row['method']} k={row['k']}",
            "draft": _number("draft", ".2f"),
            "verification": _number("verification", ".2f"),
            "others": _number("others", ".2f"),
            "steps": _number("steps", "d"),
        },
    ),
    "recurrence": (
        "Tokens of TSD's trees in recurring n-grams (Figure 3)",
        {"n": _number("n", "d"), "share": _number("share", ".1%"), "tokens": _number("tokens", ",d")},
    ),
    "ablation": (
        "Settings, one at a time; columns as above (Figure 5)",
        {
            "": lambda row: f"{row['method']} {row['setting']}={row['value']}",
            "accept": _number("acceptance_rate", ".3f"),
            "share": _number("drafted_share", ".3f"),
            "drafted": _number("drafted_per_token", ".1f"),
            "fed": _number("fed_per_token", ".1f"),
        },
    ),
    "merging": (
        "KL divergence by merging, in nats; tau of the authors, k=16 is all (Table 5)",
        {
            "": lambda row: f"k={row['k']} tau={row['tau']}",
            "mean": _number("mean_kl", ".2e"),
            "median": _number("median_kl", ".2e"),
            "merged": _number("merged", ",d"),
        },
    ),
    "ranks": (
        "Accepted drafts by the child's rank (Figures 7 and 8)",
        {
            "": lambda row: row["value"] if row["by"] == "method" else f"gsd {row['by']}={row['value']}",
            **{str(rank): _rank(rank) for rank in (1, 2, 3, 4)},
            "accepted": _number("accepted", ",d"),
        },
    ),
}
