"""The report of the finished parts, a function of their results alone.

A terminal table, index.html with three plots, report.json, acceptance.csv, W&B's summary.
"""

import base64
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from conf import UserError
from conf.console import PlainConsole, label, print_line
from conf.files import read_result, with_checksum, write_bytes, write_json
from conf.tracker import TrackerConfig, WandbRun
from infer.bench.acceptance import acceptance_csv
from infer.bench.config import PARTS
from infer.bench.gsd import RANKS, TIMES
from infer.bench.gsd_plots import gsd_plots
from infer.bench.marks import IMPOSSIBLE
from infer.bench.multipl_e import with_container_verdicts
from infer.bench.runs import BASE, PEER, PLAIN
from infer.bench.sdsat_plots import sdsat_plots
from infer.bench.statistics import grouped

matplotlib.use("Agg")
style.use("tableau-colorblind10")
RESULT = "result.json"  # of a part, in its folder
POSITIONS = 8  # of drafts, in the tables
SPEED_HEADS = (
    "decoder",
    "tok/\nfwd",
    "length",
    "speed-\nup",
    "95 %",
    "tok/s",
    "acc.\n%",
    "1st\nms",
    "same",
)
GSD_HEADS = (
    "setting",
    "acc.\n%",
    "drafted\na text",
    "success\n%",
    "length",
    "speed-\nup",
    "95 %",
    "same",
)
STEP_HEADS = ("setting", "draft", "verification", "rest")
QUALITY_HEADS = (
    "benchmark",
    "model",
    "decoder",
    "metric",
    "%",
    "95 %",
    "of",
    "same",
)
ENDS_HEADS = (
    "benchmark",
    "model",
    "decoder",
    "first\nline %",
    "uncut\n%",
    "cut off at\nthe limit",
    "of",
)
LOAD_COLUMNS = {  # heads by the name of the figure, with its decimal places
    "request_throughput": ("req/s", 2),
    "output_throughput": ("tok/s", 1),
    "median_ttft_ms": ("TTFT\np50", 0),
    "p99_ttft_ms": ("TTFT\np99", 0),
    "median_tpot_ms": ("TPOT\np50", 1),
    "p99_tpot_ms": ("TPOT\np99", 1),
    "median_itl_ms": ("ITL\np50", 1),
    "p99_itl_ms": ("ITL\np99", 1),
}
SOURCE_HEADS = {  # by the name of the source
    "adaptive": "adaptive\ntokens",
    "text": "text's\nn-grams",
    "ngrams": "training\nn-grams",
}
SPEEDS = ("speedup", "output_tokens_per_second")
SCALARS = (
    "tokens_per_forward",
    "mean_acceptance_length",
    "draft_acceptance_rate",
)
Row = Mapping[str, Any]


@dataclass
class Table:
    """A table of texts for terminal and page."""

    title: str
    heads: Sequence[str]
    rows: list[list[str]]


def write_report(folder: Path, tracker: TrackerConfig) -> dict[str, Any]:
    """Write the report of the finished parts in `folder`, send it to W&B, and return it."""
    report = read_parts(folder)
    write_json(folder / "report.json", with_checksum(report))
    plots = {}
    if report["speed"]:
        rows = report["speed"]["rows"]
        write_bytes(folder / "acceptance.csv", acceptance_csv(rows).encode())
        plots = {
            "Speedup over plain decoding": png(partial(draw_speedups, rows)),
            "Acceptance rate per position (survival)": png(
                partial(draw_survival, rows)
            ),
            "Cost of a forward": png(
                partial(draw_roofline, report["speed"]["roofline"])
            ),
        }
    drawn = gsd_plots(report["gsd"]["rows"]) if report["gsd"] else {}
    html = page(report, plots, drawn)
    write_bytes(folder / "index.html", html.encode("utf-8", "replace"))
    log(tracker, folder, report)
    return report


def read_parts(folder: Path) -> dict[str, Any]:
    """Return the finished parts by name, None for the others.

    Raises UserError if there is none.
    """
    files = {part: folder / part / RESULT for part in PARTS}
    parts = {
        part: read_result(file) if file.is_file() else None
        for part, file in files.items()
    }
    if not any(parts.values()):
        raise UserError(
            f"out={folder} must have a finished part, got none. Run python -m infer.bench."
        )
    if quality := parts["quality"]:
        solutions = folder / "quality" / "solutions"
        quality["rows"] = with_container_verdicts(quality["rows"], solutions)
    return {"name": folder.resolve().name, **parts}


def header(part: Row) -> str:
    """Return a line with the circumstances of a part."""
    settings = part["settings"]
    machine = part["hardware"]
    model = Path(settings["model"]).resolve().name
    facts = [
        f"{model} (gated)" if part["gated"] else model,
        settings["dtype"],
        machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread(s)",
    ]
    if (ranks := part.get("ranks", 1)) > 1:
        facts.append(f"divided over {ranks} processes")
    if part["kind"] == "speed":
        speed = settings["speed"]
        temperatures = ", ".join(f"{value:g}" for value in speed["temperatures"])
        facts += [
            f"k={', '.join(map(str, speed['k']))}",
            f"T={temperatures} (top_k={speed['top_k']}, top_p={speed['top_p']:g})",
            f"chat template: {', '.join(part['chat']) or 'none'}",
            f"{settings['count']} prompts a set x {speed['rounds']} rounds",
            f"up to {speed['max_new_tokens']} new tokens, texts stop at EOS",
        ]
    else:
        own = settings[part["kind"]]
        facts += [f"{name}={value}" for name, value in own.items() if value is not None]
    return f"{', '.join(facts)}; {part['date'][:10]}, commit {part['commit'][:8]}"


def tables_of(report: Row, part: str) -> list[Table]:
    """Return the tables of a finished part; those without rows are left out."""
    rows = report[part]["rows"]
    if part == "quality":
        tables = [quality_table(rows), ends_table(rows)]
    elif part == "gsd":
        tables = []
        for (prompt_set, name), group in grouped(rows, "prompt_set", "part"):
            title = f"{prompt_set}: {name}"
            tables += [gsd_table(title, group), step_table(group), rank_table(group)]
    elif part == "load":
        tables = [
            load_table(f"{prompt_set}: requests at once, times in ms", group)
            for (prompt_set,), group in grouped(rows, "prompt_set")
        ]
    else:
        tables = []
        for (prompt_set, temperature), group in grouped(
            rows, "prompt_set", "temperature"
        ):
            title = ", ".join([prompt_set, sampling(temperature), *set_marks(group)])
            tables += [
                speed_table(title, group),
                position_table(group),
                source_table(group),
            ]
    return [each for each in tables if each.rows]


def speed_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the decoders on one prompt set at one temperature."""
    cells = []
    for row in rows:
        rate = row["output_tokens_per_second"]
        cells.append(
            [
                row["decoder"],
                number(row["tokens_per_forward"]),
                number(row["mean_acceptance_length"]),
                speedup(row),
                "" if row["decoder"] == PLAIN else interval(row["speedup_interval"]),
                marked(f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}", row),
                number(row.get("acceptance_rate"), 0, 100),
                marked(f"{row['first_token_ms']:.0f}", row),
                same(row),
            ]
        )
    return Table(title, SPEED_HEADS, cells)


def position_table(rows: Sequence[Row]) -> Table:
    """Return the shares of verifications whose drafts were accepted up to a position."""
    drafting = [row for row in rows if row["survival"]]
    deepest = min(POSITIONS, max((len(row["survival"]) for row in drafting), default=0))
    cells = []
    for row in drafting:
        texts = [number(rate, 0, 100) for rate in row["survival"][:deepest]]
        cells.append([row["decoder"], *texts, *[""] * (deepest - len(texts))])
    heads = ["decoder", *map(str, range(1, deepest + 1))]
    return Table("acceptance rate per position, in %", heads, cells)


def source_table(rows: Sequence[Row]) -> Table:
    """Return who earns the gain: each source's share of the accepted drafts."""
    drafting = [row for row in rows if row["sources"]]
    cells = []
    for row in drafting:
        shares = [number(row["sources"].get(name), 0, 100) for name in SOURCE_HEADS]
        length = number(row["mean_acceptance_length"])
        cells.append([row["decoder"], speedup(row), length, *shares])
    heads = ["decoder", "speed-\nup", "length", *SOURCE_HEADS.values()]
    return Table("who earns it: accepted drafts by source, in %", heads, cells)


def quality_table(rows: Sequence[Row]) -> Table:
    """Return the scores."""
    cells = [
        [
            row["benchmark"],
            row["who"],
            row["decoder"],
            row["metric"],
            number(row["value"], 1, 100),
            interval(row["interval"], 1, 100),
            str(row["problems"]),
            same(row),
        ]
        for row in rows
    ]
    return Table("scores", QUALITY_HEADS, cells)


def load_table(title: str, rows: Sequence[Row]) -> Table:
    """Return throughput and latencies by requests at once and decoder."""
    cells = []
    for row in rows:
        figures = [
            number(row[name], places) for name, (_, places) in LOAD_COLUMNS.items()
        ]
        place = [str(row["concurrency"]), row["decoder"], str(row["completed"])]
        cells.append([*place, *figures, same(row)])
    heads = [head for head, _ in LOAD_COLUMNS.values()]
    return Table(title, ["at\nonce", "decoder", "of", *heads, "same"], cells)


def ends_table(rows: Sequence[Row]) -> Table:
    """Return exact matches of first lines and of whole answers, and answers without an end.

    Results from before these were counted have no row.
    """
    cells = [
        [
            row["benchmark"],
            row["who"],
            row["decoder"],
            number(row["value"] if row["uncut"] is not None else None, 1, 100),
            number(row["uncut"], 1, 100),
            str(row["cut_off"]),
            str(row["problems"]),
        ]
        for row in rows
        if "cut_off" in row
    ]
    return Table("ends of the answers", ENDS_HEADS, cells)


def gsd_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows of one table of GSD."""
    cells = [
        [
            row["setting"],
            number(row["acceptance_rate"], 1, 100),
            number(row["drafted_tokens"], 1),
            number(row["graph_success"], 1, 100),
            number(row["mean_acceptance_length"]),
            number(row["speedup"]),
            interval(row["speedup_interval"]),
            same(row),
        ]
        for row in rows
    ]
    return Table(title, GSD_HEADS, cells)


def step_table(rows: Sequence[Row]) -> Table:
    """Return the times of the parts of a step (GSD's Table 3)."""
    cells = [
        [row["setting"], *(number(row[name], 1) for name in TIMES)] for row in rows
    ]
    return Table("milliseconds of the median step", STEP_HEADS, cells)


def rank_table(rows: Sequence[Row]) -> Table:
    """Return the shares of the accepted drafts by their rank among siblings."""
    cells = [
        [row["setting"], *(number(share, 0, 100) for share in row["rank_shares"])]
        for row in rows
    ]
    heads = ["setting", *map(str, range(1, 1 + RANKS))]
    return Table("accepted drafts by rank among siblings, in %", heads, cells)


def number(value: float | None, places: int = 2, scale: float = 1) -> str:
    """Format a figure; empty for None."""
    return "" if value is None else f"{scale * value:.{places}f}"


def interval(ends: Sequence[float] | None, places: int = 2, scale: float = 1) -> str:
    """Format an interval; empty for None."""
    return "–".join(number(end, places, scale) for end in ends or ())


def speedup(row: Row) -> str:
    """Format a speedup; an impossible one says so."""
    text = marked(f"{row['speedup']:.2f}", row)
    return f"{text} {IMPOSSIBLE}" if IMPOSSIBLE in row["marks"] else text


def set_marks(rows: Sequence[Row]) -> list[str]:
    """Return the marks of a set at one temperature."""
    return list(dict.fromkeys(mark for row in rows for mark in row["marks"]))


def marked(text: str, row: Row) -> str:
    """Add a question mark to a figure of a row that has marks."""
    return f"{text}?" if row["marks"] else text


def same(row: Row) -> str:
    """Format the number of texts that equal plain decoding's; empty if none was compared."""
    return f"{row['same']}/{row['compared']}" if row["compared"] else ""


def sampling(temperature: float) -> str:
    """Return the name of a temperature."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def print_report(report: Row, parts: Collection[str]) -> None:
    """Print the warnings of these parts, then their tables."""
    console = PlainConsole()
    for part in parts:
        for warning in report[part]["warnings"]:
            console.print(f"warning: {warning}", soft_wrap=True)
    for part in parts:
        console.print(header(report[part]), soft_wrap=True)
        for each in tables_of(report, part):
            console.table(each.title, each.heads, each.rows)


def draw_speedups(rows: Sequence[Row], figure: Figure) -> None:
    """Draw speedups with intervals, a panel for each prompt set and temperature."""
    drafting = [row for row in rows if row["decoder"] != PLAIN]
    panels = grouped(drafting, "prompt_set", "temperature")
    tallest = max((len(group) for _, group in panels), default=1)
    axes = panels_of(figure, len(panels), height=0.9 + 0.25 * tallest)
    for axis, ((prompt_set, temperature), group) in zip(axes, panels):
        for row in reversed(group):
            peer = row["decoder"].startswith((PEER, BASE))
            ends = row["speedup_interval"] or (row["speedup"], row["speedup"])
            low, high = (abs(end - row["speedup"]) for end in ends)
            axis.barh(
                label(row["decoder"]),
                row["speedup"],
                xerr=[[low], [high]],
                color="C4" if peer else "C0",
                alpha=0.4 if row["marks"] else 1,
                ecolor="#333333",
                capsize=2,
            )
        axis.axvline(1, color="#333333", linewidth=0.8)
        title = ", ".join([label(prompt_set), sampling(temperature), *set_marks(group)])
        axis.set_title(title, fontsize=9)


def draw_survival(rows: Sequence[Row], figure: Figure) -> None:
    """Draw survival by position at the lowest temperature, a panel for each prompt set."""
    lowest = min(row["temperature"] for row in rows)
    drafting = [row for row in rows if row["temperature"] == lowest and row["survival"]]
    panels = grouped(drafting, "prompt_set")
    axes = panels_of(figure, len(panels), height=3)
    for axis, ((prompt_set,), group) in zip(axes, panels):
        for row in group:
            survival = row["survival"][: 2 * POSITIONS]
            axis.plot(
                range(1, len(survival) + 1),
                survival,
                marker=".",
                label=label(row["decoder"]),
            )
        axis.set_title(f"{label(prompt_set)}, {sampling(lowest)}", fontsize=9)
        axis.set_xlabel("position of the draft", fontsize=8)
        axis.set_ylim(0, 1)
        axis.legend(fontsize=7)


def draw_roofline(roofline: Row, figure: Figure) -> None:
    """Draw the milliseconds of a forward by its rows, and the lower bound."""
    (axis,) = panels_of(figure, 1, height=3)
    rows = roofline["rows"]
    axis.plot(rows, roofline["ms"], ".-", label="measured")
    axis.plot(rows, roofline["roofline_ms"], "--", label="roofline")
    axis.set_xscale("log", base=2)
    axis.set_xticks(rows, list(map(str, rows)))
    axis.set_ylim(0)
    axis.set_xlabel(f"rows, behind {roofline['context']} tokens", fontsize=8)
    axis.set_ylabel("ms", fontsize=8)
    axis.legend(fontsize=8)


def panels_of(figure: Figure, count: int, *, height: float) -> list[Axes]:
    """Return the axes of `count` panels, two in a row, each of this height in inches."""
    lines = max(1, -(-count // 2))
    columns = min(2, max(1, count))
    figure.set_size_inches(4.2 * columns, height * lines)
    axes: list[Axes] = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for axis in axes:
        axis.tick_params(labelsize=8)
    for axis in axes[count:]:
        axis.set_visible(False)
    return axes[:count]


def png(draw: Callable[[Figure], None]) -> bytes:
    """Return a plot as PNG."""
    figure = Figure(dpi=130, layout="constrained")
    draw(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def page(
    report: Row, plots: Mapping[str, bytes], gsd: Mapping[str, bytes] | None = None
) -> str:
    """Return the report as one HTML file without scripts or links to other files.

    `plots` are PNG of part=speed, `gsd` SVG of part=gsd.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    images = {name: base64.b64encode(image).decode() for name, image in plots.items()}
    drawn = {
        name: base64.b64encode(image).decode() for name, image in (gsd or {}).items()
    }
    finished = [part for part in PARTS if report.get(part)]
    return environment.get_template("report.html.j2").render(
        report=report,
        headers={part: header(report[part]) for part in finished},
        tables={part: tables_of(report, part) for part in finished},
        plots=images,
        gsd_plots=drawn,
        sdsat_plots=sdsat_plots(report["speed"]["rows"]) if report["speed"] else {},
    )


def log(tracker: TrackerConfig, folder: Path, report: Row) -> None:
    """Send the figures to the folder's W&B run, or to a new one, as its summary."""
    if tracker.mode == "disabled":
        return
    settings = {part: report[part]["settings"] for part in PARTS if report.get(part)}
    run = WandbRun(
        tracker,
        folder,
        name=f"{report['name']}-report",
        job_type="report",
        settings=settings,
        tell=partial(print_line, error=True),
    )
    run.send(lambda run: run.summary.update(scalars(report)))
    run.finish()


def scalars(report: Row) -> dict[str, float]:
    """Return the figures by names that W&B groups into sections, without marked speeds."""
    values = {}
    for row in report["speed"]["rows"] if report["speed"] else ():
        place = f"speed/{row['prompt_set']}/T{row['temperature']:g}/{row['decoder']}"
        for name in SCALARS if row["marks"] else (*SPEEDS, *SCALARS):
            values[f"{place}/{name}"] = row[name]
    for row in report["load"]["rows"] if report.get("load") else ():
        place = f"load/{row['prompt_set']}/{row['concurrency']}/{row['decoder']}"
        for name in LOAD_COLUMNS:
            values[f"{place}/{name}"] = row[name]
    for row in report["quality"]["rows"] if report["quality"] else ():
        name = f"{row['who']}_{row['decoder']}/{row['metric']}"
        values[f"quality/{row['benchmark']}/{name}"] = row["value"]
    return {
        name.replace(".", "_"): value
        for name, value in values.items()
        if value is not None
    }
