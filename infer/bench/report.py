"""Write the report of the finished parts from their results alone.

The report is tables on the terminal, index.html, report.json, acceptance.csv and W&B's summary.
"""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from conf.console import PlainConsole, print_line
from conf.errors import UserError, counted
from conf.pages import render, short_path
from conf.runs.files import read_result, with_checksum, write_bytes, write_json
from conf.runs.tracker import TrackerConfig, log_files, start_run
from infer.bench.acceptance import acceptance_csv
from infer.bench.config import PARTS
from infer.bench.multipl_e import with_container_verdicts
from infer.bench.plots import plots_of
from infer.bench.statistics import Report
from infer.bench.summary import summarize
from infer.bench.tables import LOAD_COLUMNS, MEANINGS, tables_of

TEMPLATE = Path(__file__).with_name("report.html.j2")
NAMES = {
    "speed": "Speed",
    "quality": "Quality",
    "gsd": "Graph-structured drafts",
    "load": "Requests at once",
}
RESULT = "result.json"  # the file with the result of a part, in the part's folder
SPEEDS = ("speedup", "output_tokens_per_second")
SCALARS = (
    "tokens_per_forward",
    "mean_acceptance_length",
    "draft_acceptance_rate",
)
GSD_SCALARS = (
    "acceptance_rate",
    "drafted_tokens",
    "drafted_share",
    "mean_acceptance_length",
    "speedup",
)
FILES = ("report.json", "index.html", "acceptance.csv")
LOCAL = ("endpoint", "decoders", "k")  # settings of load that a server does not use


def write_report(folder: Path, tracker: TrackerConfig) -> dict[str, Any]:
    """Write the report of the finished parts in `folder`, send it to W&B, and return it."""
    report = read_parts(folder)
    write_json(folder / "report.json", with_checksum(report))
    if report["speed"]:
        rows = report["speed"]["rows"]
        write_bytes(folder / "acceptance.csv", acceptance_csv(rows).encode())
    write_bytes(folder / "index.html", page(report).encode("utf-8", "replace"))
    log(tracker, folder, report)
    return report


def read_parts(folder: Path, setting: str = "out") -> dict[str, Any]:
    """Return the results of the parts by name, with None for unfinished parts.

    Raises UserError without a finished part, with the name of the setting of `folder`.
    """
    files = {part: folder / part / RESULT for part in PARTS}
    parts = {
        part: read_result(file) if file.is_file() else None
        for part, file in files.items()
    }
    if not any(parts.values()):
        raise UserError(
            f"{setting}={folder} must have a finished part. Run python -m infer.bench."
        )
    if quality := parts["quality"]:
        solutions = folder / "quality" / "solutions"
        quality["rows"] = with_container_verdicts(quality["rows"], solutions)
    return {"name": folder.resolve().name, **parts}


def header(part: Mapping[str, Any]) -> str:
    """Return a line with the model, machine, settings, date and commit of a part."""
    settings = part["settings"]
    own = settings[part["kind"]]
    model = short_path(settings["model"])
    if server := own.get("endpoint"):  # its machine and type of weights are not known
        own = {name: value for name, value in own.items() if name not in LOCAL}
        facts = [f"server {server}", f"prompts by the tokenizer of {model}"]
    else:
        machine = part["hardware"]
        facts = [
            f"{model} (gated)" if part["gated"] else model,
            settings["dtype"],
            machine["gpu"]
            or f"{machine['cpu']}, {counted(machine['threads'], 'thread')}",
        ]
    if (ranks := part.get("ranks", 1)) > 1:
        facts.append(f"divided over {ranks} processes")
    if part["kind"] == "speed":
        temperatures = ", ".join(f"{value:g}" for value in own["temperatures"])
        prompts = sorted({row["prompts"] for row in part["rows"]})
        count = counted(prompts[-1], "prompt")
        if len(prompts) > 1:
            count = f"{prompts[0]} to {count}"
        new = f"up to {counted(own['max_new_tokens'], 'new token')}"
        if middle := settings.get("infilling_tokens"):
            new += f" ({middle} of an infilling)"
        facts += [
            f"T={temperatures} (top_k={own['top_k']}, top_p={own['top_p']:g})",
            f"chat template: {', '.join(part['chat']) or 'not used'}",
            f"{count} per set x {counted(own['rounds'], 'round')}",
            f"{new}, texts stop at EOS",
        ]
    else:
        facts += [f"{name}={value}" for name, value in own.items() if value is not None]
    return f"{', '.join(facts)}; {part['date'][:10]}, commit {part['commit'][:8]}"


def print_report(report: Report, parts: Collection[str]) -> None:
    """Print the warnings and the tables of these parts, and the summary if speed is among them."""
    console = PlainConsole()
    for part in parts:
        for warning in report[part]["warnings"]:
            console.print(f"warning: {warning}", soft_wrap=True)
    if "speed" in parts and (summary := summarize(report)):
        console.print(f"\n{summary.sentence}", style="bold")
        grid = Table.grid(padding=(0, 2, 0, 0))
        for cell in summary.cells:
            grid.add_row(cell.name, cell.figure, cell.note)
        console.print(grid)
        console.print()
    for part in parts:
        console.print(header(report[part]), soft_wrap=True)
        for each in tables_of(report, part):
            console.table(each.title, each.heads, each.rows, names=each.names)


def page(report: Report) -> str:
    """Return the report as an HTML page without scripts or links to other files."""
    finished = [part for part in PARTS if report.get(part)]
    first = report[finished[0]]
    return render(
        TEMPLATE,
        title=short_path(first["settings"]["model"]),
        kicker=f"decoding report, {first['date'][:10]}",
        report=report,
        summary=summarize(report),
        names=NAMES,
        headers={part: header(report[part]) for part in finished},
        tables={part: tables_of(report, part) for part in finished},
        plots={part: plots_of(report, part) for part in finished},
        meanings={part: MEANINGS[part] for part in finished},
    )


def log(tracker: TrackerConfig, folder: Path, report: Report) -> None:
    """Send the figures, as the summary, and the report's files to the folder's run.

    The figures are not metadata of the files too: W&B allows 100 keys there.
    """
    settings = {part: report[part]["settings"] for part in PARTS if report.get(part)}
    run = start_run(
        tracker,
        folder,
        name=f"{report['name']}-report",
        job_type="report",
        settings=settings,
        tell=partial(print_line, error=True),
    )
    if run is None:
        return
    values = scalars(report)
    run.send(lambda run: run.summary.update(values))
    name = f"report-{report['name']}"
    facts = {
        part: {key: report[part][key] for key in ("date", "commit")}
        for part in settings
    }
    run.send(lambda run: log_files(run, name, "report", folder, facts, FILES))
    run.finish()


def scalars(report: Report) -> dict[str, float]:
    """Return the figures by names that W&B groups into sections, without speeds of marked rows."""
    values = {}
    for row in report["speed"]["rows"] if report["speed"] else ():
        prefix = f"speed/{row['prompt_set']}/T{row['temperature']:g}/{row['decoder']}"
        for name in SCALARS if row["marks"] else (*SPEEDS, *SCALARS):
            values[f"{prefix}/{name}"] = row[name]
    for row in report["load"]["rows"] if report.get("load") else ():
        prefix = f"load/{row['prompt_set']}/{row['concurrency']}/{row['decoder']}"
        for name in LOAD_COLUMNS:
            values[f"{prefix}/{name}"] = row[name]
    for row in report["gsd"]["rows"] if report.get("gsd") else ():
        prefix = f"gsd/{row['prompt_set']}/{row['part']}/{row['setting']}"
        for name in GSD_SCALARS:
            values[f"{prefix}/{name}"] = row[name]
    for row in report["quality"]["rows"] if report["quality"] else ():
        name = f"{row['who']}_{row['decoder']}/{row['metric']}"
        values[f"quality/{row['benchmark']}/{name}"] = row["value"]
    return {
        name.replace(".", "_"): value
        for name, value in values.items()
        if value is not None
    }
