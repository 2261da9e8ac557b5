"""Write the page of a run, OUT/index.html.

The page shows the curves of log.jsonl and of the validations, the recipe, the data and the
machine. All functions except `write_page` are pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from conf.console import format_duration, speed
from conf.errors import counted
from conf.pages import COLOURS, Cell, Draw, render, svg
from conf.runs.files import write_bytes
from conf.runs.stage import commit, processor, versions
from train.config import TrainConfig
from train.metrics import describe_change, first_and_last

PAGE = "index.html"
TEMPLATE = Path(__file__).with_name("run.html.j2")
SMOOTHED = 0.02  # half-width of a curve's running mean, as a share of all steps
MAX_OFFSETS = 6  # number of lines in the plot of accuracies by offset
# Height of that plot relative to its highest line, for two rows of legend.
LEGEND_ROOM = 1.25
# Space above a curve that begins at a fixed floor, as a share of its height.
HEADROOM = 0.05
Metrics = Mapping[str, Any]  # of a step or a validation, by name


@dataclass(frozen=True)
class Run:
    """The content of a page: `steps` are the lines of log.jsonl, `validation` the held-out metrics."""

    name: str
    config: TrainConfig
    steps: Sequence[Metrics]
    validation: Sequence[Metrics]
    #: tokens of one sequence
    seq_len: int
    #: total number of steps; None with minutes= until the number is planned
    planned: int | None
    #: facts of the model by name, such as base model and parameters
    model: Mapping[str, str]
    #: facts of the data by name, such as documents and tokens
    data: Mapping[str, str]
    #: facts of the machine by name, such as device, ranks and versions
    machine: Mapping[str, str]


def write_page(out: Path, run: Run) -> None:
    """Write the page of a run into its folder."""
    write_bytes(out / PAGE, page(run).encode("utf-8", "replace"))


def page(run: Run) -> str:
    """Return the page as one HTML file."""
    return render(
        TEMPLATE,
        title=run.name,
        sentence=describe_change(run.validation).capitalize() + ".",
        progress=f"step {steps_done(run):,}"
        + (f" of {run.planned:,}" if run.planned else ""),
        cells=cells(run),
        plots={title: svg(draw, title) for title, draw in plots(run).items()},
        tables={
            "Model": run.model,
            "Data": run.data,
            "Machine and time": {**run.machine, **time_facts(run)},
            "Settings that differ from the defaults": recipe(run.config),
        },
    )


def steps_done(run: Run) -> int:
    """Return the number of the last step that is logged or validated."""
    logged = run.steps[-1]["step"] if run.steps else 0
    return int(max(logged, run.validation[-1]["step"]))


def cells(run: Run) -> list[Cell]:
    """Return the main figures of the first and the last comparable validation."""
    rows = first_and_last(run.validation)
    first, last = rows[0], rows[-1]
    result = []
    if "tau_real" in last:
        result.append(
            Cell(
                "mean acceptance length",
                " → ".join(f"{row['tau_real']:.2f}" for row in rows),
                "tokens per verification along held-out text, by adaptive tokens alone",
            )
        )
    if "accuracy_1" in last:
        result.append(
            Cell(
                "accuracy of the first draft",
                " → ".join(f"{100 * row['accuracy_1']:.0f}" for row in rows) + " %",
                "share of held-out windows where the token after the next one is right",
            )
        )
    change = last["standard_loss"] / first["standard_loss"] - 1
    result.append(
        Cell(
            "held-out loss",
            f"{last['standard_loss']:.3f}"
            + (f" ({100 * change:+.1f} %)" if len(rows) == 2 else ""),
            "nats per standard token; a gated adapter does not change it",
        )
    )
    seconds = training_seconds(run)
    if seconds:
        tokens = len(run.steps) * run.config.global_batch * run.seq_len
        result.append(
            Cell(
                "training time",
                format_duration(seconds),
                f"of all steps; {speed(tokens / seconds)}, {tokens:,} tokens",
            )
        )
    return result


def training_seconds(run: Run) -> float:
    """Return the total seconds of the logged steps, without validations and checkpoints."""
    tokens = run.config.global_batch * run.seq_len
    return float(sum(tokens / row["tokens_per_second"] for row in run.steps))


def time_facts(run: Run) -> dict[str, str]:
    """Return the time and the memory of the steps, by name."""
    if not run.steps:
        return {}
    memory = max(row["memory_gib"] for row in run.steps)
    seconds = training_seconds(run)
    return {
        "time of all steps": format_duration(seconds),
        "mean time of a step": f"{seconds / len(run.steps):.2f} s",
        "peak memory of a rank": f"{memory:.1f} GiB",
    }


def recipe(config: TrainConfig) -> dict[str, str]:
    """Return the settings that differ from their defaults and have a value, as text by name.

    `steps` has no effect with minutes= and is left out.
    """
    unused = "steps" if config.minutes is not None else None
    return {
        name: str(value)
        for name, value in changed_settings(config, TrainConfig())
        if value not in (None, "") and name != unused
    }


def changed_settings(
    settings: Any, defaults: Any, prefix: str = ""
) -> list[tuple[str, Any]]:
    """Return the names and values of the settings that differ from `defaults`, of the same type."""
    result: list[tuple[str, Any]] = []
    for field in fields(settings):
        value, default = getattr(settings, field.name), getattr(defaults, field.name)
        name = f"{prefix}{field.name}"
        if is_dataclass(value):
            result += changed_settings(value, default, f"{name}.")
        elif value != default:
            result.append((name, value))
    return result


def model_facts(
    base: Mapping[str, str], *, parameters: int, dtype: str
) -> dict[str, str]:
    """Return the facts of the model by name; `base` is the result of pretrained.base_model."""
    return {
        "base": base.get("hub") or base.get("name") or "random weights",
        "parameters": f"{parameters:,}",
        "dtype of the weights": dtype,
        "license of the base": base.get("license", "not known"),
    }


def data_facts(trained_on: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of the data by name, from the summary `trained_on` of train.data."""
    layouts = ", ".join(
        f"{count:,} {name}" for name, count in trained_on["modes"].items()
    )
    facts = {
        "documents": f"{trained_on['documents']:,} ({layouts})",
        "tokens": f"{trained_on['tokens']:,}",
        "languages": ", ".join(trained_on["languages"]),
        "decontaminated against": ", ".join(
            trained_on["decontaminated"] or ["nothing"]
        ),
    }
    if own := trained_on.get("own"):
        facts["the model's own text"] = (
            f"{counted(own['documents'], 'document')}, {counted(own['tokens'], 'token')}, "
            f"{100 * own['share']:.0f} % of each step"
        )
    return facts


def machine_facts(device: str, *, ranks: int) -> dict[str, str]:
    """Return the facts of the machine by name, and the date of the page."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return {
        "device": processor() if device == "cpu" else device,
        "processes": str(ranks),
        "versions": packages,
        "commit": commit()[:8],
        "page written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def plots(run: Run) -> dict[str, Draw]:
    """Return the plots that have data, by title."""
    curve = partial(_curve, run)
    by_title: dict[str, Draw | None] = {
        "Mean acceptance length (held-out)": curve(
            held_out="tau_real", floor=1, unit="tokens per verification"
        ),
        "Accuracy by offset (held-out)": _accuracies(run),
        "Loss of drafts": curve(
            step="masked_loss", held_out="masked_loss", unit="nats per token"
        ),
        "Loss of standard tokens": curve(
            step="standard_loss", held_out="standard_loss", unit="nats per token"
        ),
        "Tokens per second": curve(step="tokens_per_second", floor=0, unit="tokens/s"),
        "Learning rate": curve(step="lr", floor=0, smooth=False),
        "Gradient norm": curve(step="gradient_norm", floor=0),
    }
    return {title: draw for title, draw in by_title.items() if draw}


def _curve(
    run: Run,
    *,
    step: str | None = None,
    held_out: str | None = None,
    floor: float | None = None,
    unit: str = "",
    smooth: bool = True,
) -> Draw | None:
    """Return a plot of the metric `step` of all steps and the metric `held_out` of validations.

    `floor` is the lower limit of the axis, `unit` its label. Returns None if there is nothing to draw.
    """
    steps = [(row["step"], row[step]) for row in run.steps if step and step in row]
    marks = [
        (row["step"], row[held_out])
        for row in run.validation
        if held_out and held_out in row
    ]
    if not steps and not marks:
        return None

    def draw(axes: Axes) -> None:
        if steps:
            x = [number for number, _ in steps]
            y = [value for _, value in steps]
            if smooth:
                axes.plot(x, y, color=COLOURS[0], alpha=0.25, linewidth=0.8)
                y = running_mean(y, round(SMOOTHED * len(y)))
            axes.plot(x, y, color=COLOURS[0], label="training")
        if marks:
            axes.plot(
                *zip(*marks, strict=True), ".-", color=COLOURS[1], label="held-out"
            )
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        if floor is not None:
            top = axes.get_ylim()[1]
            axes.set_ylim(floor, top + HEADROOM * (top - floor))
        if steps and marks:
            axes.legend()

    return draw


def _accuracies(run: Run) -> Draw | None:
    """Return the plot of accuracy by offset over the steps of the validations."""
    last = run.validation[-1]
    offsets = [
        offset for offset in range(1, MAX_OFFSETS + 1) if f"accuracy_{offset}" in last
    ]
    if not offsets:
        return None

    def draw(axes: Axes) -> None:
        for offset in offsets:
            name = f"accuracy_{offset}"
            rows = [row for row in run.validation if name in row]
            axes.plot(
                [row["step"] for row in rows],
                [100 * row[name] for row in rows],
                ".-",
                label=f"offset {offset}",
            )
        axes.set_xlabel("step")
        axes.set_ylabel("%")
        axes.set_ylim(0, LEGEND_ROOM * axes.get_ylim()[1])
        axes.legend(loc="upper left", ncols=3)

    return draw


def running_mean(values: Sequence[float], half: int) -> list[float]:
    """Return the mean of each value and up to `half` neighbours on each side."""
    index = np.arange(len(values))
    first = np.maximum(index - half, 0)
    end = np.minimum(index + half + 1, len(values))
    total = np.concatenate([[0.0], np.cumsum(values)])
    means: list[float] = ((total[end] - total[first]) / (end - first)).tolist()
    return means
