"""The report: a terminal table, index.html with three plots, report.json, acceptance.csv, a summary in W&B.

It lies above the measurements and is a function of their results alone.
"""

import base64
import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from conf import UserError
from conf.console import PlainConsole, label, print_line
from conf.files import read_result, with_checksum, write_bytes, write_json
from conf.tracker import TrackerConfig, WandbRun, run_file
from infer.bench.speed import BASE, PEER, PLAIN
from infer.view import KINDS

matplotlib.use("Agg")
RESULT = "result.json"  # of a part, in its folder
PARTS = ("speed", "quality", "gsd")
PADDING = (0, 1, 0, 0)
POSITIONS = 8  # whose acceptance the tables show
HUES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#888888",
)  # Okabe and Ito's
Row = Mapping[str, Any]
Cells = tuple[list[str], list[list[str]]]  # heads, and rows of texts


def write_report(folder: Path, tracker: TrackerConfig) -> dict[str, Any]:
    """Write the report of the finished parts in `folder`, send it to W&B, and return it."""
    report = read_parts(folder)
    write_json(folder / "report.json", with_checksum(report))
    plots = {}
    for name, (title, draw) in plots_of(report).items():
        plots[title] = png(draw)
        write_bytes(folder / f"{name}.png", plots[title])
    write_bytes(folder / "index.html", page(report, plots).encode("utf-8", "replace"))
    if report["speed"]:
        write_bytes(
            folder / "acceptance.csv", acceptance_csv(report["speed"]["rows"]).encode()
        )
    log(tracker, folder, report)
    return report


def read_parts(folder: Path) -> dict[str, Any]:
    """Return the parts that are finished; None for the others. Raises UserError where there is none."""
    files = {part: folder / part / RESULT for part in PARTS}
    parts = {
        part: read_result(file) if file.is_file() else None
        for part, file in files.items()
    }
    if not any(parts.values()):
        raise UserError(
            f"out={folder} must have a finished part, got none. Run python -m infer.bench"
        )
    return {"name": folder.resolve().name, **parts}


def header(part: Row) -> str:
    """Return in a line what a part's figures are of."""
    settings = part["settings"]
    machine = part["hardware"]
    place = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread(s)"
    model = Path(settings["model"]["path"]).resolve().name
    chat = "chat template" if settings["chat"] else "no chat template"
    facts = [
        model + (" (gated)" if part["gated"] else ""),
        settings["dtype"],
        place,
        chat,
    ]
    if part["kind"] == "speed":
        speed = settings["speed"]
        facts.append(f"{settings['count']} prompts a set x {speed['rounds']} rounds")
        facts.append(f"up to {speed['max_new_tokens']} new tokens, texts stop at EOS")
        facts.append(f"sampled: top_k={speed['top_k']}, top_p={speed['top_p']:g}")
    elif part["kind"] == "quality":
        facts.append(f"up to {settings['quality']['max_new_tokens']} new tokens")
    else:
        gsd = settings["gsd"]
        facts.append(
            ", ".join(
                f"{name}={gsd[name]}"
                for name in ("k", "theta_prob", "theta_sib", "tau")
            )
        )
    return f"{', '.join(facts)}; {part['date'][:10]}, commit {part['commit'][:8]}"


def speed_cells(rows: Sequence[Row]) -> Cells:
    """Return the table of one prompt set at one temperature."""
    heads = [
        "decoder",
        "tok/s",
        "speed-\nup",
        "95 %",
        "length",
        "acc.\n%",
        "tok/\nfwd",
        "1st\nms",
        "same",
    ]
    cells = [
        [
            row["decoder"],
            f"{row['output_tokens_per_second']:.0f}"
            if row["output_tokens_per_second"] >= 10
            else f"{row['output_tokens_per_second']:.2g}",
            f"{row['speedup']:.2f}",
            "–".join(f"{end:.2f}" for end in row["speedup_interval"] or ())
            if row["decoder"] != PLAIN
            else "",
            number(row["mean_acceptance_length"]),
            percent(row["draft_acceptance_rate"]),
            number(row["tokens_per_forward"]),
            f"{row['first_token_ms']:.0f}",
            f"{row['same']}/{row['compared']}" if row["compared"] else "",
        ]
        for row in rows
    ]
    return heads, cells


def position_cells(rows: Sequence[Row]) -> Cells:
    """Return acceptance by position: survival in the first line of a decoder, conditional in the second."""
    drafting = [row for row in rows if row["survival"]]
    deepest = min(POSITIONS, max((len(row["survival"]) for row in drafting), default=0))
    heads = ["decoder", "rate", *map(str, range(1, deepest + 1))]
    cells = []
    for row in drafting:
        for name in ("survival", "conditional"):
            places = [percent(share) for share in row[name][:deepest]]
            cells.append(
                [row["decoder"], name, *places, *[""] * (deepest - len(places))]
            )
    return heads, cells


def source_cells(rows: Sequence[Row]) -> Cells:
    """Return who earns the accepted drafts: by source its share of them, and the share of its own accepted."""
    drafting = [row for row in rows if row["sources"]]
    sources = list(
        dict.fromkeys(source for row in drafting for source in row["sources"])
    )
    heads = [
        "decoder",
        *(f"{source}\n{what}" for source in sources for what in ("share", "accepted")),
    ]
    cells = [
        [
            row["decoder"],
            *(
                percent(row["sources"].get(source, {}).get(what))
                for source in sources
                for what in ("share", "acceptance")
            ),
        ]
        for row in drafting
    ]
    return heads, cells


def quality_cells(rows: Sequence[Row]) -> Cells:
    """Return the table of the scores."""
    heads = ["benchmark", "model", "decoder", "T", "metric", "%", "95 %", "of", "same"]
    cells = [
        [
            row["benchmark"],
            row["who"],
            row["decoder"],
            f"{row['temperature']:g}",
            row["metric"],
            percent(row["value"], 1),
            "–".join(f"{100 * end:.1f}" for end in row["interval"] or ()),
            str(row["problems"]),
            f"{row['same']}/{row['compared']}" if row["compared"] else "",
        ]
        for row in rows
    ]
    return heads, cells


def gsd_cells(rows: Sequence[Row]) -> Cells:
    """Return the rows of one table of GSD."""
    every = dict.fromkeys(key for row in rows for key in row)
    names = [name for name in every if name not in ("part", "prompt_set")]
    return names, [[_gsd_cell(row.get(name)) for name in names] for row in rows]


def _gsd_cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_gsd_cell, value))
    return (
        f"{value:.3g}"
        if isinstance(value, float)
        else ""
        if value is None
        else str(value)
    )


def number(value: float | None) -> str:
    """Format a figure to two places; nothing for None."""
    return "" if value is None else f"{value:.2f}"


def percent(value: float | None, places: int = 0) -> str:
    """Format a share in percent; nothing for None."""
    return "" if value is None else f"{100 * value:.{places}f}"


def tables_of(
    report: Row, parts: Collection[str] = PARTS
) -> dict[str, list[tuple[str, Cells]]]:
    """Return the tables of each finished part, with their titles."""
    tables: dict[str, list[tuple[str, Cells]]] = {
        part: [] for part in parts if report[part]
    }
    if "speed" in tables:
        for (prompt_set, temperature), rows in grouped(
            report["speed"]["rows"], "prompt_set", "temperature"
        ):
            title = f"{prompt_set}, {'greedy' if not temperature else f'temperature {temperature:g}'}"
            tables["speed"].append((title, speed_cells(rows)))
            tables["speed"].append(
                ("acceptance rate per position, in %", position_cells(rows))
            )
            tables["speed"].append(
                ("accepted drafts by source, in %", source_cells(rows))
            )
    if "quality" in tables:
        tables["quality"].append(("scores", quality_cells(report["quality"]["rows"])))
    if "gsd" in tables:
        for (prompt_set, part), rows in grouped(
            report["gsd"]["rows"], "prompt_set", "part"
        ):
            tables["gsd"].append((f"{prompt_set}: {part}", gsd_cells(rows)))
    return {
        part: [(title, cells) for title, cells in of_part if cells[1]]
        for part, of_part in tables.items()
    }


def grouped(
    rows: Sequence[Row], *names: str
) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Return rows by the values of these columns, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def print_report(
    report: Row, parts: Collection[str], console: Console | None = None
) -> None:
    """Print the tables of these parts, and what to beware of."""
    console = console or PlainConsole()
    for part, tables in tables_of(report, parts).items():
        console.print(header(report[part]), soft_wrap=True)
        for title, (heads, body) in tables:
            table = Table(
                title=title,
                title_justify="left",
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                padding=(0, 1, 0, 0),
            )
            for at, head in enumerate(heads):
                table.add_column(
                    head, justify="left" if at == 0 else "right", no_wrap=True
                )
            for cells in body:
                table.add_row(*cells)
            console.print(table)
        for warning in report[part]["warnings"]:
            console.print(f"warning: {warning}", soft_wrap=True)


def acceptance_csv(rows: Sequence[Row]) -> str:
    """Return the columns of speculators' evaluation, a row for each prompt set, decoder and temperature.

    A draft is a verification there, and acceptance at a position is survival.
    """
    drafting = [row for row in rows if row["verifications"]]
    deepest = max((len(row["survival"]) for row in drafting), default=0)
    positions = [f"acceptance_at_pos_{at}" for at in range(deepest)]
    counts = [
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "acceptance_length",
    ]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["subset", "decoder", "temperature", *counts, *positions])
    for row in drafting:
        survival = [*row["survival"], *[0.0] * (deepest - len(row["survival"]))]
        named = [row["prompt_set"], row["decoder"], row["temperature"]]
        figures = [
            row["verifications"],
            row["drafted"],
            row["accepted"],
            row["mean_acceptance_length"],
        ]
        writer.writerow([*named, *figures, *survival])
    return file.getvalue()


def plots_of(report: Row) -> dict[str, tuple[str, Callable[[Figure], None]]]:
    """Return the title of each plot and what draws it, by the name of its file; none without speed."""
    speed = report["speed"]
    if not speed:
        return {}
    return {
        "speedup": (
            "Speedup over plain decoding",
            partial(draw_speedups, speed["rows"]),
        ),
        "acceptance": (
            "Acceptance by position (survival)",
            partial(draw_acceptance, speed["rows"]),
        ),
        "rows": ("Cost of a forward", partial(draw_rows, speed["roofline"])),
    }


def draw_speedups(rows: Sequence[Row], figure: Figure) -> None:
    """Draw bars of all decoders with their intervals, a panel for each prompt set and temperature."""
    panels = grouped(
        [row for row in rows if row["decoder"] != PLAIN], "prompt_set", "temperature"
    )
    rows_of_panels = -(-len(panels) // 2)
    height = 0.6 + 0.25 * max(len(own) for _, own in panels)
    figure.set_size_inches(4.2 * min(2, len(panels)), height * rows_of_panels)
    for axis, ((prompt_set, temperature), own) in zip(
        _axes(figure, len(panels)), panels
    ):
        names = [label(row["decoder"]) for row in own][::-1]
        values = [row["speedup"] for row in own][::-1]
        intervals = [
            row["speedup_interval"] or (row["speedup"], row["speedup"]) for row in own
        ][::-1]
        errors = [
            [max(0.0, value - low) for value, (low, _) in zip(values, intervals)],
            [max(0.0, high - value) for value, (_, high) in zip(values, intervals)],
        ]
        hues = [
            HUES[6] if row["decoder"].startswith((PEER, BASE)) else HUES[0]
            for row in own
        ][::-1]
        axis.barh(names, values, xerr=errors, color=hues, ecolor="#333333", capsize=2)
        axis.axvline(1, color="#333333", linewidth=0.8)
        axis.set_title(
            f"{label(prompt_set)}, {'greedy' if not temperature else f'T={temperature:g}'}",
            fontsize=9,
        )
        axis.tick_params(labelsize=8)


def draw_acceptance(rows: Sequence[Row], figure: Figure) -> None:
    """Draw the share of verifications whose drafts were accepted up to each position, greedy or coldest."""
    coldest = min(row["temperature"] for row in rows)
    drafting = [
        row for row in rows if row["temperature"] == coldest and row["survival"]
    ]
    panels = grouped(drafting, "prompt_set")
    figure.set_size_inches(
        4.2 * min(2, max(1, len(panels))), 3 * max(1, -(-len(panels) // 2))
    )
    for axis, ((prompt_set,), own) in zip(_axes(figure, len(panels)), panels):
        for at, row in enumerate(own):
            survival = row["survival"][: 2 * POSITIONS]
            style = (
                "--"
                if row["decoder"].startswith(PEER)
                else "-"
                if at < len(HUES)
                else ":"
            )
            places = range(1, len(survival) + 1)
            axis.plot(
                places,
                survival,
                style,
                color=HUES[at % len(HUES)],
                marker=".",
                label=label(row["decoder"]),
            )
        axis.set_title(f"{label(prompt_set)}, T={coldest:g}", fontsize=9)
        axis.set_xlabel("position of a draft", fontsize=8)
        axis.set_ylim(0, 1)
        axis.legend(fontsize=7)
        axis.tick_params(labelsize=8)


def draw_rows(roofline: Row, figure: Figure) -> None:
    """Draw milliseconds of a forward by its rows, measured and by the roofline."""
    figure.set_size_inches(4.2, 3)
    axis = figure.subplots()
    axis.plot(
        roofline["rows"],
        roofline["ms"],
        "-",
        color=HUES[0],
        marker=".",
        label="measured",
    )
    if roofline["roofline_ms"]:
        axis.plot(
            roofline["rows"],
            roofline["roofline_ms"],
            "--",
            color=HUES[1],
            label="roofline",
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(roofline["rows"], list(map(str, roofline["rows"])))
    axis.set_ylim(0)
    axis.set_xlabel(
        f"rows of a forward, behind {roofline['context']} tokens", fontsize=8
    )
    axis.set_ylabel("ms", fontsize=8)
    axis.legend(fontsize=8)
    axis.tick_params(labelsize=8)


def _axes(figure: Figure, count: int) -> list[Axes]:
    """Return the axes of `count` panels, two in a row; one that is left over is not shown."""
    axes = (
        figure.subplots(max(1, -(-count // 2)), min(2, max(1, count)), squeeze=False)
        .flatten()
        .tolist()
    )
    for axis in axes[count:]:
        axis.set_visible(False)
    return axes


def png(draw: Callable[[Figure], None]) -> bytes:
    """Return a plot as PNG."""
    figure = Figure(dpi=130, layout="constrained")
    draw(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def page(report: Row, plots: Mapping[str, bytes]) -> str:
    """Return the report as one HTML file without scripts or links to other files."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        name=report["name"],
        headers={part: header(report[part]) for part in PARTS if report[part]},
        warnings=[
            warning
            for part in PARTS
            if report[part]
            for warning in report[part]["warnings"]
        ],
        plots={
            title: base64.b64encode(image).decode() for title, image in plots.items()
        },
        tables=tables_of(report),
        samples=report["speed"]["samples"] if report["speed"] else [],
        kinds=KINDS,
    )


def log(tracker: TrackerConfig, folder: Path, report: Row) -> None:
    """Send the figures of the report to the run that the folder has, or a new one, as its summary."""
    if tracker.mode == "disabled":
        return
    parts = {part: report[part] for part in PARTS if report[part]}
    model = Path(next(iter(parts.values()))["settings"]["model"]["path"])
    run = WandbRun(
        tracker,
        folder,
        file=run_file(folder),
        name=f"{report['name']}-report",
        job_type="report",
        settings={part: value["settings"] for part, value in parts.items()},
        tell=partial(print_line, error=True),
        linked=run_file(model.parent, model.name),  # of the model's export
    )
    run.send(lambda run: run.summary.update(scalars(report)))
    run.finish()


def scalars(report: Row) -> dict[str, float]:
    """Return the figures by names that W&B groups into sections."""
    values: dict[str, float] = {}
    figures = (
        "speedup",
        "output_tokens_per_second",
        "mean_acceptance_length",
        "draft_acceptance_rate",
    )
    for row in report["speed"]["rows"] if report["speed"] else ():
        place = f"speed/{row['prompt_set']}/T{row['temperature']:g}/{row['decoder']}".replace(
            ".", "_"
        )
        values |= {
            f"{place}/{name}": row[name] for name in figures if row[name] is not None
        }
    for row in report["quality"]["rows"] if report["quality"] else ():
        place = f"quality/{row['benchmark']}/T{row['temperature']:g}/{row['who']}_{row['decoder']}"
        if row["value"] is not None:
            values[f"{place}/{row['metric']}".replace(".", "_")] = row["value"]
    return values
