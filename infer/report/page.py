"""A report as one HTML page that needs nothing but itself, to be read in light and dark, wide and narrow."""

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from infer.report.page_speed import bars, limits, speed_sets
from infer.report.plots import PLOTS
from infer.report.quality_tables import quality_tables
from infer.report.rows import (
    FORWARD,
    GATED,
    SOURCES,
    benchmark,
    differs,
    dotted,
    label,
    number,
    percent,
    same,
    span,
    task,
)
from infer.view import coloured

FOLDER = Path(__file__).parent
CARDS = 3  # of speed, and 2 of quality


def report_page(report: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
    """The page of a report, with these of its plots in it."""
    speed, quality = report["speed"], report["quality"]
    samples = [*(speed or {}).get("samples", []), *(quality or {}).get("samples", [])]
    return render(
        "page.html.j2",
        report=report,
        cards=_cards(report["summary"]),
        method=[(kind.capitalize(), _method(report[kind])) for kind in ("speed", "quality") if report[kind]],
        speed=speed_sets(report) if speed else None,
        bars=bars(speed["rows"]) if speed else [],
        limits=limits(speed) if speed else None,
        quality=_quality(quality) if quality else None,
        figures={name: _figure(name, image) for name, image in images.items()},
        samples=[_sample(one) for one in samples],
        legend=Markup(coloured.legend({kind for one in samples for kind, _ in one["pieces"]})),
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
        "source_names": ", ".join(SOURCES.values()),
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
        *([("adapter", GATED)] if part.get("gated") else []),
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
    pieces = [coloured.span(kind, text, title=coloured.meaning(kind)) for kind, text in one["pieces"]]
    text = "".join([coloured.span("given", one["before"]), *pieces, coloured.span("given", one["after"])])
    title = [one.get("prompt_set") or benchmark(one["benchmark"]), one["id"], label({"k": 0, **one})]
    title += [one["dtype"]] if one.get("dtype") else []
    title += [f"temperature {one['temperature']:g}"] if one.get("temperature") else []
    title += [one["who"], one["verdict"]] if "verdict" in one else []
    return {"title": ", ".join(title), "text": Markup(text)}
