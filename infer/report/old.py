"""The speed report: JSON, plots after the paper's Figures 3 and 4, a table, and the same to W&B.

Knows rows of figures; knows nothing of how they were measured.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import wandb
from rich import box
from rich.console import Console
from rich.table import Table

from conf.stage import versions, write_json
from conf.tracker import TrackerConfig
from infer.hardware import hardware

PLOTS = {"tokens_per_second": "tokens per second", "acceptance_rate": "acceptance rate"}


def write_report(
    out: Path, *, name: str, settings: dict[str, Any], rows: list[dict[str, Any]], tracker: TrackerConfig
) -> dict[str, Any]:
    """Write report.json and the plots into the folder `out`, and log both under `name`; returns the report."""
    report = {
        "schema": 1,
        "hardware": hardware(),
        "versions": versions(),
        "settings": settings,
        "rows": rows,
        "summary": summarise(rows),
    }
    for measure in PLOTS:
        plot(rows, measure, out / f"{measure}.png")
    write_json(out / "report.json", report)
    _log(out, name, report, tracker)
    return report


def read_report(out: Path) -> dict[str, Any]:
    """The report of a finished folder."""
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each prompt set the row of the fastest decoder that drafts; none for texts too short for drafts."""
    found = {}
    for name in dict.fromkeys(row["prompt_set"] for row in rows):
        drafted = [row for row in rows if row["prompt_set"] == name and row["acceptance_rate"] is not None]
        if drafted:
            found[name] = max(drafted, key=lambda row: row["tokens_per_second"])
    return found


def plot(rows: Sequence[dict[str, Any]], measure: str, path: Path) -> None:
    """One figure: the measure against k, a line per dtype, a panel per prompt set."""
    sets = list(dict.fromkeys(row["prompt_set"] for row in rows))
    figure, axes = plt.subplots(1, len(sets), figsize=(4.6 * len(sets), 3.6), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], sets, strict=True):
        for color, dtype in zip(("C0", "C1", "C2"), dict.fromkeys(row["dtype"] for row in rows)):
            mine = [r for r in rows if r["prompt_set"] == name and r["dtype"] == dtype]
            drafts = sorted((r["k"], r[measure]) for r in mine if r["decoder"] == "sdsat")
            axis.plot(*zip(*drafts), marker="o", color=color, label=f"SDSAT, {dtype}")
            for decoder, line in (("plain", ":"), ("auto", "--"), ("gsd", "-.")):
                value = next((r[measure] for r in mine if r["decoder"] == decoder), None)
                if value is not None:
                    axis.axhline(value, color=color, linestyle=line, label=f"{decoder}, {dtype}")
        axis.set(title=name.replace("_", " "), xlabel="k, adaptive tokens")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    # Once every panel is drawn: they share the axis, and a limit set earlier would cut the later ones.
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel(PLOTS[measure])
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_report(report: dict[str, Any]) -> None:
    """A table for each prompt set, and a sentence where drafts were made."""
    console, machine = Console(highlight=False), report["hardware"]
    for name in dict.fromkeys(row["prompt_set"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["prompt_set"] == name]
        title = f"{rows[0]['prompts']} prompts of {name} on {machine['gpu'] or machine['cpu']}"
        console.print(_table(rows, f"{title}, {machine['threads']} thread(s)"))
        best = report["summary"].get(name)
        if best is None:
            console.print(f"{name}: the texts were too short for drafts.\n")
            continue
        console.print(
            f"{name}: {_label(best)} in {best['dtype']} is {best['speedup']:.2f}x plain decoding, and "
            f"{best['speedup_over_fastest_plain']:.2f}x plain decoding in its fastest dtype "
            f"({best['fastest_plain_dtype']}), at {best['tokens_per_forward']:.2f} tokens per forward.\n"
        )


def _table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("dtype", "decoder"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "speedup", "accepted", "tok/forward", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in rows:
        if last not in (None, row["dtype"]):
            table.add_section()
        accepted = "" if row["acceptance_rate"] is None else f"{100 * row['acceptance_rate']:.0f} %"
        table.add_row(
            row["dtype"] if row["dtype"] != last else "",
            _label(row),
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            accepted,
            f"{row['tokens_per_forward']:.2f}",
            f"{row['identical']}/{row['prompts']}",
        )
        last = row["dtype"]
    return table


def _label(row: dict[str, Any]) -> str:
    if row["decoder"] == "auto":
        return "sdsat auto"
    return row["decoder"] + (f" k={row['k']}" if row["k"] else "")


def _log(out: Path, name: str, report: dict[str, Any], tracker: TrackerConfig) -> None:
    if tracker.mode == "disabled":
        return
    run = wandb.init(
        project=tracker.project,
        name=f"{name}-speed",
        mode=tracker.mode,  # type: ignore[arg-type]
        dir=str(out),
        config=report["settings"] | {"hardware": report["hardware"]},
        settings=wandb.Settings(silent=True, console="off"),
    )
    columns = [name for name in report["rows"][0] if name != "speedup_range"]
    table = wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in report["rows"]])
    images = {measure: wandb.Image(str(out / f"{measure}.png")) for measure in PLOTS}
    run.log({"speed": table, **images, "summary": report["summary"]})
    run.finish()
