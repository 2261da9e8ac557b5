"""The study's tables on a terminal and its plots, after the paper's. Knows rows, not how they were measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from conf import console
from infer.report.rows import Row
from infer.report.tables import table
from infer.report.terminal import print_table
from infer.study.measurements import CHILDREN


def print_study(report: Mapping[str, Any]) -> None:
    """Print all parts that were measured."""
    output, machine, settings = console.PlainConsole(), report["hardware"], report["settings"]
    output.print(
        f"{settings['draft']['model']} drafts for {settings['model']} in {settings['dtype']} on "
        f"{machine['gpu'] or machine['cpu']}, {machine['threads']} thread(s), {report['date']}\n"
    )
    for part, (title, columns) in TABLES.items():
        rows = report.get(part, [])
        for name in dict.fromkeys(row.get("prompt_set", "") for row in rows):
            mine = [row for row in rows if row.get("prompt_set", "") == name]
            cells = ([cell(row) for cell in columns.values()] for row in mine)
            print_table(output, table(title + (name and f", {name}"), list(columns), cells))


def _number(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else format(row[name], form)


def _way(row: Row) -> str:
    parts = (row["decoding"], row["method"], row["budget"], row["verify"])
    return " ".join(part for part in parts if part not in (None, "fixed", "pick"))


def _rank(rank: int) -> Callable[[Row], str]:
    return lambda row: "" if row["shares"] is None else f"{row['shares'][rank - 1]:.3f}"


_RATES = {
    "accept": _number("acceptance_rate", ".3f"),
    "share": _number("drafted_share", ".3f"),
    "drafted": _number("drafted_per_token", ".1f"),
    "fed": _number("fed_per_token", ".1f"),
}
_OF_METHODS: dict[str, Callable[[Row], str]] = {
    "": _way,
    **_RATES,
    "success": _number("graph_success", ".1%"),
    "speedup": _number("speedup", ".2f"),
    "same": lambda row: f"{row['identical']}/{row['prompts']}",
}
TABLES: dict[str, tuple[str, Mapping[str, Callable[[Row], str]]]] = {
    "methods": (
        "Methods; accept is by level drafted, share of the text; drafted and fed are by token (Table 1)",
        _OF_METHODS,
    ),
    "sampling": ("Keyed draws and verification by ratio (Table 2)", _OF_METHODS),
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
        {"": lambda row: f"{row['method']} {row['setting']}={row['value']}", **_RATES},
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

SHADES = {
    "greedy": "#1f77b4",
    "greedy measured": "#9ecae1",
    "greedy wide": "#08306b",
    "top-p": "#e6550d",
    "top-p measured": "#fdbe85",
    "keyed draws": "#e6550d",
    "by ratio": "#756bb1",
}
BUDGETS = {"measured": " measured", "wide": " wide"}
METHODS = {"ssd": "SSD", "tsd": "TSD", "gsd": "GSD", "self-ssd": "Self-SSD"}
SETTINGS = {"k": "k, children of a node", "tau": "τ", "theta_prob": "θ_prob", "theta_sib": "θ_sib"}


def plot_methods(rows: Sequence[Row]) -> Figure:
    """Plot acceptance rate and speedup, a panel for each set of prompts (Table 1)."""
    return _bars_by_set(rows, lambda row: row["decoding"] + BUDGETS.get(row["budget"], ""))


def plot_sampling(rows: Sequence[Row]) -> Figure:
    """Return the same of keyed draws and of verification by ratio (Table 2)."""
    return _bars_by_set(rows, lambda row: "by ratio" if row["verify"] == "ratio" else "keyed draws")


def plot_time(rows: Sequence[Row]) -> Figure:
    """Plot one bar for each setting (Table 3)."""
    figure, ((axis,),) = _figure(1, 1, width=6.4)
    names = [f"{METHODS[row['method']]}, k={row['k']}" for row in rows]
    left = [0.0] * len(rows)
    for part in ("draft", "verification", "others"):
        values = [row[part] or 0.0 for row in rows]
        axis.barh(names, values, left=left, label=part, height=0.6)
        left = [before + value for before, value in zip(left, values)]
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds of a step, medians")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)
    axis.grid(alpha=0.3, axis="x")
    return figure


def plot_recurrence(rows: Sequence[Row]) -> Figure:
    """Plot Figure 3."""
    figure, ((axis,),) = _figure(1, 1)
    axis.bar([row["n"] for row in rows], [100 * (row["share"] or 0) for row in rows], width=0.6)
    axis.set(xlabel="n", ylabel="tokens in recurring n-grams, %", ylim=(0, 100))
    axis.grid(alpha=0.3, axis="y")
    return figure


def plot_ablation(rows: Sequence[Row]) -> Figure:
    """Plot acceptance rate and drafted tokens against each setting (Figure 5)."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure = Figure(figsize=(3.2 * len(settings), 5.6), layout="constrained")
    axes = figure.subplots(2, len(settings), squeeze=False, sharex="col", sharey="row")
    for column, setting in enumerate(settings):
        for axis, measure in zip(axes[:, column], ("acceptance_rate", "drafted_per_token")):
            for method, line in (("gsd", "-"), ("tsd", "--")):
                mine = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
                at, values = [row["value"] for row in mine], [row[measure] for row in mine]
                axis.plot(at, values, linestyle=line, marker="o", label=METHODS[method] if mine else None)
            axis.grid(alpha=0.3)
        axes[1][column].set_xlabel(SETTINGS[setting])
    axes[0][0].set_ylabel("acceptance rate")
    axes[1][0].set_ylabel("drafted tokens by emitted token")
    axes[1][0].set_yscale("log")
    axes[1][0].yaxis.set_major_formatter("{x:g}")
    axes[1][0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[1][0].yaxis.set_minor_locator(NullLocator())
    axes[0][0].legend()
    return figure


def plot_merging(rows: Sequence[Row]) -> Figure:
    """Plot KL divergence against τ (Table 5)."""
    figure, ((axis,),) = _figure(1, 1)
    for color, k in zip(("C0", "C1", "C2"), dict.fromkeys(row["k"] for row in rows)):
        for name, line in (("mean", "-"), ("median", "--")):
            mine = [row for row in rows if row["k"] == k and row[f"{name}_kl"] is not None]
            at, values = [row["tau"] for row in mine], [row[f"{name}_kl"] for row in mine]
            axis.plot(at, values, color=color, linestyle=line, marker="o", label=f"k={k}, {name}")
    axis.set(xlabel="τ", ylabel="KL divergence by merging, nats", yscale="log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)
    return figure


def plot_ranks(rows: Sequence[Row]) -> Figure:
    """Plot shares of the accepted drafts by their rank (Figures 7 and 8)."""
    figure, axes = _figure(1, 2)
    for axis, by, title in zip(axes[0], ("method", "theta_sib"), ("by method", "GSD")):
        mine = [row for row in rows if row["by"] == by]
        names = [METHODS.get(row["value"], str(row["value"])) for row in mine]
        shares = [row["shares"] or [0.0] * CHILDREN for row in mine]
        groups = {f"child {rank + 1}": [100 * share[rank] for share in shares] for rank in range(CHILDREN)}
        _bars(axis, names, groups, {})
        axis.set(title=title, ylabel="accepted drafts, %", ylim=(0, 100))
    axes[0][1].set_xlabel("θ_sib")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


PLOTS: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "methods": plot_methods,
    "sampling": plot_sampling,
    "time": plot_time,
    "recurrence": plot_recurrence,
    "ablation": plot_ablation,
    "merging": plot_merging,
    "ranks": plot_ranks,
}


def _figure(rows: int, columns: int, width: float = 4.6) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width * columns, 3.5 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _bars_by_set(rows: Sequence[Row], group: Callable[[Row], str]) -> Figure:
    sets = list(dict.fromkeys(row["prompt_set"] for row in rows))
    figure, axes = _figure(2, len(sets), width=5.4)
    for column, name in enumerate(sets):
        mine = [row for row in rows if row["prompt_set"] == name and row["method"] != "plain"]
        methods = list(dict.fromkeys(row["method"] for row in mine))
        for axis, measure in zip(axes[:, column], ("acceptance_rate", "speedup")):
            values = {(group(row), row["method"]): row[measure] or 0.0 for row in mine}
            groups = {
                label: [values.get((label, method), 0.0) for method in methods]
                for label in dict.fromkeys(map(group, mine))
            }
            _bars(axis, [METHODS[method] for method in methods], groups, SHADES)
            axis.set(ylabel=measure.replace("_", " "), title=console.label(name.replace("_", " ")))
        axes[0][column].set_ylim(0, 1)
        axes[1][column].axhline(1, color="black", linewidth=1, linestyle=":")
        axes[1][column].set_ylabel("speedup over plain decoding")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _bars(
    axis: Axes, names: Sequence[str], groups: Mapping[str, Sequence[float]], colors: Mapping[str, str]
) -> None:
    width = 0.8 / len(groups)
    for place, (label, values) in enumerate(groups.items()):
        at = [index - 0.4 + width * (place + 0.5) for index in range(len(names))]
        axis.bar(at, values, width, label=label, color=colors.get(label))
    axis.set_xticks(range(len(names)), names)
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)
