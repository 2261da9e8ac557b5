"""Figures of bars: speedups by prompt set, and scores beside the base model's."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from conf import characters
from infer.report.palette import WHO, color
from infer.report.panels import WIDE, coolest, finish, panels
from infer.report.rows import PLACE, Row, groups, label, task

Part = Mapping[str, Any]


def speedup_by_set(part: Part) -> Figure | None:
    """Bars with 95 % intervals at the lowest temperature: every decoder, sdsat with its fastest k."""
    rows = _fastest_k(
        [row for row in coolest(part["rows"]) if row["decoder"] not in ("plain", "base") and row["speedup"]]
    )
    if not rows:
        return None
    by_dtype = {key[0]: mine for key, mine in groups(rows, "dtype").items()}
    figure, shown = panels(by_dtype, columns=1)
    for axis, mine in shown:
        sets = list(dict.fromkeys(row["prompt_set"] for row in mine))
        decoders = {row["decoder"]: label({**row, "k": "*"}) for row in mine}
        width = 0.84 / len(decoders)
        for place, (decoder, name) in enumerate(decoders.items()):
            own = [row for row in mine if row["decoder"] == decoder]
            at = [sets.index(row["prompt_set"]) - 0.42 + width * (place + 0.5) for row in own]
            axis.bar(
                at,
                [row["speedup"] for row in own],
                0.92 * width,
                yerr=_errors(own, "speedup", "speedup_interval"),
                error_kw={"elinewidth": 1, "capsize": 2},
                color=color(decoder),
                hatch="///" if own[0]["peer"] else None,
                edgecolor="white",
                linewidth=0,
                label=name,
            )
        axis.axhline(1, color=color("plain"), linewidth=1.2, label="plain decoding")
        axis.set_xticks(range(len(sets)), [characters.label(name.replace("_", " ")) for name in sets])
        axis.tick_params(axis="x", length=0)
        axis.grid(visible=False, axis="x")
    return finish(figure, shown, ylabel="speedup over plain decoding")


def scores(part: Part) -> Figure | None:
    """Bars with 95 % intervals: the base model's scores beside the model's, both decoded plainly."""
    rows = [row for row in part["rows"] if row["decoder"] == "plain"]
    if not rows:
        return None
    places = groups(rows, *PLACE)
    figure = Figure(figsize=(WIDE, 1.1 + 0.36 * len(places)), layout="constrained")
    axis = figure.subplots()
    for offset, who in ((-0.19, "base"), (0.19, "model")):
        found = [(at, row) for at, mine in enumerate(places.values()) for row in mine if row["who"] == who]
        if found:
            own = [row for _, row in found]
            axis.barh(
                [at + offset for at, _ in found],
                [row["value"] for row in own],
                0.36,
                xerr=_errors(own, "value", "interval"),
                error_kw={"elinewidth": 1, "capsize": 2},
                color=WHO[who],
                label={"base": "base model", "model": "fine-tuned model"}[who],
            )
    names = [
        f"{task(mine[0])}, {mine[0]['metric']}"
        + (f", temperature {mine[0]['temperature']:g}" if mine[0]["temperature"] else "")
        for mine in places.values()
    ]
    axis.set_yticks(range(len(names)), map(characters.label, names))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.grid(alpha=0.3, axis="x")
    axis.set_axisbelow(True)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _fastest_k(rows: Sequence[Row]) -> list[Row]:
    """Of each decoder's rows in a prompt set and dtype the fastest one."""
    found = groups(rows, "prompt_set", "dtype", "decoder").values()
    return [max(mine, key=lambda row: row["speedup"]) for mine in found]


def _errors(rows: Sequence[Row], name: str, interval: str) -> list[list[float]]:
    """How far the ends of the intervals lie below and above the values."""
    ends = [row[interval] or (row[name], row[name]) for row in rows]
    below = [max(0.0, row[name] - low) for row, (low, _) in zip(rows, ends)]
    return [below, [max(0.0, high - row[name]) for row, (_, high) in zip(rows, ends)]]
