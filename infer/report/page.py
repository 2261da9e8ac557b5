"""A report as one HTML page that needs nothing but itself, to be read in light and dark, wide and narrow."""

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from infer.report.plots import PLOTS
from infer.report.quality_tables import quality_tables
from infer.report.rows import (
    FORWARD,
    Row,
    benchmark,
    differs,
    dotted,
    drafts,
    groups,
    label,
    number,
    percent,
    quantity,
    same,
    span,
    task,
)
from infer.report.summary import sentence, sure
from infer.view import coloured

FOLDER = Path(__file__).parent
CARDS = 3  # of speed, and 2 of quality
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
    "accepted by place": lambda row: " ".join(map(percent, row["acceptance_by_position"] or ())),
    "peak memory": lambda row: quantity(row["peak_memory_bytes"], "B"),
}


def report_page(report: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
    """The page of a report, with these of its plots in it."""
    speed, quality = report["speed"], report["quality"]
    samples = [*(speed or {}).get("samples", []), *(quality or {}).get("samples", [])]
    return render(
        "page.html.j2",
        report=report,
        cards=_cards(report["summary"]),
        method=[(kind.capitalize(), _method(report[kind])) for kind in ("speed", "quality") if report[kind]],
        speed=_speed_sets(report) if speed else None,
        bars=_bars(speed["rows"]) if speed else [],
        limits=_limits(speed) if speed else None,
        quality=_quality(quality) if quality else None,
        figures={name: _figure(name, image) for name, image in images.items()},
        samples=[_sample(one) for one in samples],
        legend=Markup(
            coloured.legend(shared=any(kind == "shared" for one in samples for kind, _ in one["pieces"]))
        ),
    )


def render(template: str, **context: Any) -> str:
    """A page from a template of this folder."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "label": label,
        "same": same,
        "differs": differs,
        "number": number,
        "percent": percent,
        "span": span,
    }
    found.globals |= {
        "forward": FORWARD,
        "colours": Markup(coloured.STYLE),
        "style": Markup((FOLDER / "style.css").read_text(encoding="utf-8")),
    }
    return found


def _cards(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Three to five figures of the headline."""
    coolest = min((one["temperature"] for one in summary["best"]), default=0)
    found = [
        {
            "value": f"{one['speedup']:.2f}×",
            "label": f"plain decoding, {one['prompt_set'].replace('_', ' ')}",
            "note": f"{one['label']}, {one['dtype']}",
            "interval": one["speedup_interval"] and span(one["speedup_interval"]),
        }
        for one in summary["best"]
        if one["temperature"] == coolest
    ][:CARDS]
    found += [
        {
            "value": percent(one["model"], 1),
            "label": f"{task(one)}, {one['metric']}",
            "note": "" if one["base"] is None else f"base model {percent(one['base'], 1)}",
            "interval": one["model_interval"] and span([100 * end for end in one["model_interval"]], ".0f"),
        }
        for one in summary["scores"]
        if one["model"] is not None
    ][:2]
    return found


def _method(part: Mapping[str, Any]) -> dict[str, Any]:
    machine = part["hardware"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    units = part["units"]
    pairs = [
        *_models(part["settings"]),
        ("measured", part["date"]),
        ("on", f"{device}, {machine['threads']} thread(s) a process, {part.get('ranks') or 1} process(es)"),
        ("with", ", ".join(f"{name} {version}" for name, version in part["versions"].items())),
        ("commit", part["commit"]),
        ("done", f"{units['done']} of {units['all']} units"),
    ]
    return {"pairs": pairs, "settings": list(dotted(part["settings"]))}


def _models(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    drafting = settings.get("draft") or {}
    named = {"model": settings["model"], "base": settings.get("base"), "draft model": drafting.get("model")}
    return [(name, folder) for name, folder in named.items() if folder]


def _speed_sets(report: Mapping[str, Any]) -> list[dict[str, Any]]:
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
        }
        for (heat, dtype), mine in found
    ]


def _best_exact(rows: Sequence[Row]) -> Row | None:
    exact = [row for row in rows if drafts(row) and row["exact"] and row["speedup"]]
    return max(exact, key=sure, default=None)


def _more(row: Row) -> list[str]:
    name = f"{label(row)}, {row['dtype']}, {row['temperature']:g}"
    return [name, *(shown(row) for shown in MORE.values())]


def _bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
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


def _limits(speed: Mapping[str, Any]) -> dict[str, Any]:
    head = [
        "dtype",
        "weights",
        "copy bandwidth",
        "multiplications",
        "least time of a forward of one row",
        "measured",
    ]
    measured = {one["dtype"]: dict(zip(one["rows"], one["ms"])) for one in speed["costs"]}
    rows = [
        [
            one["dtype"],
            quantity(one["weights_bytes"], "B"),
            quantity(one["copy_bytes_per_second"], "B/s"),
            quantity(one["flops_per_second"], "FLOP/s"),
            f"{one['forward_ms'][0][1]:.3g} ms",
            f"{ms:.3g} ms" if (ms := measured.get(one["dtype"], {}).get(1)) else "",
        ]
        for one in speed["limits"]
    ]
    return {"head": head, "rows": rows}


def _quality(part: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sandbox": part.get("sandbox"),
        "tables": quality_tables(part),
        "same": [
            [
                task(one),
                one["who"],
                f"{one['decoder']} and {one['against']}",
                f"{one['identical']}/{one['compared']}",
            ]
            for one in part["same"]
        ],
        "rules": [(benchmark(name), rule) for name, rule in part.get("rules", {}).items()],
        "skipped": [(task(one), one["reason"]) for one in part["skipped"]],
    }


def _figure(name: str, image: bytes) -> dict[str, str]:
    caption = PLOTS[name].caption
    uri = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return {"uri": uri, "caption": caption, "alt": f"Plot: {caption} Its figures are in the tables."}


def _sample(one: Mapping[str, Any]) -> dict[str, Any]:
    """A coloured text; on hovering a piece says who produced it."""
    hover = {
        "own": "the model's own",
        "drafted": "drafted and accepted",
        "shared": "accepted behind a merged node",
    }
    pieces = [coloured.span(kind, text, title=hover.get(kind, kind)) for kind, text in one["pieces"]]
    text = "".join([coloured.span("given", one["before"]), *pieces, coloured.span("given", one["after"])])
    title = [one.get("prompt_set") or benchmark(one["benchmark"]), one["id"], label({"k": 0, **one})]
    title += [one["dtype"]] if one.get("dtype") else []
    title += [f"temperature {one['temperature']:g}"] if one.get("temperature") else []
    title += [one["who"], one["verdict"]] if "verdict" in one else []
    return {"title": ", ".join(title), "text": Markup(text)}
