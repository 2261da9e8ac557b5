"""A data folder's manifest as tables."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from data_prep.encode import Mode
from data_prep.shards import SPLITS

FEW = 4  # sequences of a split below which a warning is due


def print_summary(manifest: dict[str, Any], console: Console) -> None:
    """Print languages, modes, utilisation and drops."""
    for table in (languages(manifest), splits(manifest), drops(manifest)):
        console.print(table)
    if "ngrams" in manifest:
        console.print(describe_ngrams(manifest["ngrams"]))


def warnings(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield what training will miss: a split without sequences, or next to none."""
    seq_len = manifest["seq_len"]
    remedies = {
        "train": "Give more files, or a smaller seq_len",
        "held_out": "Raise held_out, or lower seq_len",
    }
    for name, remedy in remedies.items():
        count = manifest[name]["sequences"]
        if name == "held_out" and not manifest["settings"]["held_out"]:
            continue
        if count < FEW:
            yield (
                f"{name} must have at least {FEW} sequences of {seq_len} tokens to be of use, got {count}. "
                f"{remedy}."
            )


def describe_ngrams(table: dict[str, Any]) -> str:
    """Return the n-gram table's size in a line."""
    contexts = ", ".join(f"{count:,} of order {order}" for order, count in table["contexts"].items()) or "none"
    return f"N-grams: contexts {contexts}; {table['tokens']:,} tokens counted, {table['bytes'] / 1e6:,.1f} MB"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.caption_justify = "left"
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def languages(manifest: dict[str, Any]) -> Table:
    """Tabulate documents, bytes, tokens and shares of each language; with a budget, its share of it."""
    chosen = manifest.get("chosen", {})
    target = ["wanted"] if chosen else []
    by = manifest["settings"]["proportion"]["by"]
    counted = {"bytes": "bytes", "files": "documents"}[by]
    table = _table("Languages", "language", "documents", "MB", "tokens", f"% of {by}", *target, "bytes/token")
    sums: dict[str, dict[str, int]] = {}
    for name in SPLITS:
        for language, counts in manifest[name]["languages"].items():
            total = sums.setdefault(language, {"documents": 0, "bytes": 0, "tokens": 0})
            for key, value in counts.items():
                total[key] += value
    whole = sum(total[counted] for total in sums.values())
    for language, total in sorted(sums.items(), key=lambda item: -item[1][counted]):
        aim = []
        if chosen:
            part = chosen[language]
            aim = [f"{part['share']:.2%}{'*' if part['exhausted'] else ' '}"]
        table.add_row(
            language,
            f"{total['documents']:,}",
            f"{total['bytes'] / 1e6:,.2f}",
            f"{total['tokens']:,}",
            f"{total[counted] / whole:.2%}",
            *aim,
            f"{total['bytes'] / max(1, total['tokens']):.2f}",
        )
    if any(part["exhausted"] for part in chosen.values()):
        table.caption = "* it has less than its share: all of it is taken, and the others fill the budget"
    return table


def splits(manifest: dict[str, Any]) -> Table:
    """Tabulate documents by mode, sequences, tokens and utilisation of each split."""
    table = _table("Sequences", "split", "docs", "plain", "PSM", "SPM", "sequences", "tokens", "filled")
    for name in SPLITS:
        split = manifest[name]
        modes = [split["modes"].get(mode.name, 0) for mode in Mode]
        table.add_row(
            name.replace("_", " "),
            f"{split['documents']:,}",
            *(f"{count / max(1, sum(modes)):.1%}" for count in modes),
            f"{split['sequences']:,}",
            f"{split['tokens']:,}",
            f"{split['filled']:.2%}",
        )
    return table


def drops(manifest: dict[str, Any]) -> Table:
    """Tabulate rows that went no further, by reason."""
    counts = manifest["counts"]
    rows = counts.get("rows", 0)
    table = _table("Rows", "", "rows", "share")
    listed = [("read", rows), *((f"dropped: {reason}", count) for reason, count in manifest["drops"].items())]
    listed.append(("not chosen", counts.get("not chosen", 0)))
    listed.append(("kept", counts.get("documents", 0)))
    listed.append(("kept, with control pieces encoded as text", counts.get("documents with control pieces", 0)))
    for name, count in listed:
        if count or name in ("read", "kept"):
            table.add_row(name, f"{count:,}", f"{count / max(1, rows):.2%}")
    return table
