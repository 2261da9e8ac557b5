"""What the page says of speed: sections, bars and the physical limit, as its template wants them."""

from collections.abc import Mapping, Sequence
from typing import Any

from infer.report.rows import Row, drafts, groups, label, number, percent, quantity, span
from infer.report.sources import page_table
from infer.report.summary import sentence, sure

PARTS = ("draft", "forward", "rest")
MORE = {
    "measured tokens/s": lambda row: number(row["tokens_per_second_measured"], ".0f"),
    "its quartiles": lambda row: span(row["tokens_per_second_quartiles"], ".0f"),
    "speedup, quartiles": lambda row: span(row["speedup_quartiles"]),
    "speedup, first token included": lambda row: number(row["speedup_whole"]),
    "tokens": lambda row: number(row["tokens"], ",d"),
    "forwards": lambda row: number(row["forwards"] or None, ",d"),
    "drafted tokens": lambda row: number(row["drafted"], ",d"),
    "nodes of a draft model's graph": lambda row: number(row["drafted_nodes"], ",.1f"),
    "steps that used a merged node": lambda row: percent(row["graph_success"], 1),
    "accepted of drafted tokens": lambda row: percent(row["node_efficiency"]),
    "accepted by place": lambda row: " ".join(map(percent, row["acceptance_by_position"] or ())),
    "peak memory": lambda row: quantity(row["peak_memory_bytes"], "B"),
}


def speed_sets(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of each prompt set, by dtype and temperature."""
    found = []
    for (name,), rows in groups(report["speed"]["rows"], "prompt_set").items():
        best = [one for one in report["summary"]["best"] if one["prompt_set"] == name]
        found.append(
            {
                "name": name.replace("_", " "),
                "counts": f"{rows[0]['prompts']} prompts, {rows[0]['rounds']} rounds",
                "told": [f"Temperature {one['temperature']:g}: {sentence(one)}" for one in best],
                "groups": _speed_groups(rows),
                "more": {"head": ["decoder", *MORE], "rows": [_more(row) for row in rows]},
            }
        )
    return found


def _speed_groups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By dtype and temperature; those of the lowest temperature come first, and are shown at once."""
    coolest = min(row["temperature"] for row in rows)
    found = sorted(groups(rows, "temperature", "dtype").items(), key=lambda item: item[0][0])
    return [
        {
            "name": f"{dtype}, temperature {heat:g}",
            "first": heat == coolest,
            "rows": mine,
            "best": _best_exact(mine),
            "sources": page_table(mine),
        }
        for (heat, dtype), mine in found
    ]


def _best_exact(rows: Sequence[Row]) -> Row | None:
    exact = [row for row in rows if drafts(row) and row["exact"] and row["speedup"]]
    return max(exact, key=sure, default=None)


def _more(row: Row) -> list[str]:
    name = f"{label(row)}, {row['dtype']}, {row['temperature']:g}"
    return [name, *(shown(row) for shown in MORE.values())]


def bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The parts of a forward's time, of each prompt set, dtype and temperature; the longest fills its cell."""
    known = [row for row in rows if row["ms_forward"] is not None]
    coolest = min((row["temperature"] for row in known), default=0)
    found = []
    for (name, dtype, heat), mine in groups(known, "prompt_set", "dtype", "temperature").items():
        longest = max(sum(row[f"ms_{kind}"] or 0 for kind in PARTS) for row in mine)
        found.append(
            {
                "name": f"{name.replace('_', ' ')}, {dtype}, temperature {heat:g}",
                "first": (dtype, heat) == (known[0]["dtype"], coolest),
                "bars": [_bar(row, longest) for row in mine],
            }
        )
    return found


def _bar(row: Row, longest: float) -> dict[str, Any]:
    times = {kind: row[f"ms_{kind}"] or 0.0 for kind in PARTS}
    parts = [
        {"kind": kind, "ms": f"{ms:.2f}", "share": f"{100 * ms / longest if longest else 0:.2f}"}
        for kind, ms in times.items()
    ]
    return {"name": label(row), "parts": parts, "told": ", ".join(f"{p['kind']} {p['ms']} ms" for p in parts)}


def limits(speed: Mapping[str, Any]) -> dict[str, Any]:
    """What the device does at best, and the time of a forward of one row by that and as it was measured."""
    head = [
        "dtype",
        "weights",
        "bandwidth",
        "multiplications",
        "least time of a forward of one row",
        "measured",
    ]
    measured = {one["dtype"]: dict(zip(one["rows"], one["ms"])) for one in speed["costs"]}
    rows = [
        [
            one["dtype"],
            quantity(one["weights_bytes"], "B"),
            quantity(max(one["copy_bytes_per_second"], one["read_bytes_per_second"]), "B/s"),
            quantity(one["flops_per_second"], "FLOP/s"),
            f"{one['forward_ms'][0][1]:.3g} ms",
            f"{ms:.3g} ms" if (ms := measured.get(one["dtype"], {}).get(1)) else "",
        ]
        for one in speed["limits"]
    ]
    return {"head": head, "rows": rows}
