"""A report as one HTML page that needs nothing but itself, to be read in light and dark, wide and narrow."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from conf.html import page
from infer import view
from infer.report.plots import Drawing
from infer.report.rows import (
    FORWARD,
    GATED,
    SOURCES,
    benchmark,
    dotted,
    groups,
    label,
    percent,
    span,
    task,
)
from infer.report.summary import HEADLINE, how, tells
from infer.report.tables import MAIN, MORE, limit_table, quality_tables, speed_sets, time_tables
from infer.report.training import training_facts

CARDS = 3  # of speed, and 2 of quality


def report_page(report: Mapping[str, Any], drawings: Mapping[str, Drawing]) -> str:
    """Return the page of a report, with these of its plots in it."""
    speed, quality, training = report["speed"], report["quality"], report["training"]
    samples = [*(speed or {}).get("samples", []), *(quality or {}).get("samples", [])]
    return render(
        "page.html.j2",
        report_title(report),
        report=report,
        name=report_title(report),
        cards=_speed_cards(report) + _score_cards(report["summary"]),
        method=[(kind.capitalize(), _method(report[kind])) for kind in ("speed", "quality") if report[kind]],
        speed=speed_sets(report) if speed else None,
        times=time_tables(speed["rows"]) if speed else [],
        limits=limit_table(speed) if speed else None,
        main=MAIN,
        more=MORE,
        quality=_quality(quality) if quality else None,
        training=training_facts(training, report["seconds"]) if training else None,
        figures=drawings,
        samples=[_sample(sample) for sample in samples],
        legend=Markup(view.legend({kind for sample in samples for kind, _ in sample["pieces"]})),
    )


def report_title(report: Mapping[str, Any]) -> str:
    """Return a title: the model, and what was measured."""
    kinds = " and ".join(kind for kind in ("speed", "quality") if report[kind])
    return f"{report['summary']['model'] or report['name']}: {kinds}"


def render(template: str, title: str, **context: Any) -> str:
    """Return a page from a template of this folder."""
    return page(title, _environment().get_template(template).render(context), style=view.STYLE)


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"forward": FORWARD, "source_names": ", ".join(SOURCES.values())}
    return environment


def _speed_cards(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the greedy speedup of each prompt set with the sampled one beside it."""
    cards = []
    for (name,), mine in list(groups(report["summary"]["best"], "prompt_set").items())[:CARDS]:
        first, *others = sorted(mine, key=lambda best: best["temperature"])
        notes = [f"{how(best['temperature'])}: {best['speedup']:.2f}×{_interval(best)}" for best in others[:1]]
        notes.insert(0, f"{how(first['temperature'])}, {first['dtype']}{_interval(first)}")
        text = f"plain decoding’s speed, {name.replace('_', ' ')}"
        cards.append({"value": f"{first['speedup']:.2f}×", "label": text, "notes": notes})
    rows = report["speed"]["rows"] if report["speed"] else []
    for mine in groups(rows, "prompt_set", "dtype", "temperature").values():
        times = {row["decoder"]: row for row in mine if row["token_ms_p50"]}
        if HEADLINE in times and "plain" in times:
            row, (half, most) = times[HEADLINE], _token_times(times["plain"])
            own_half, own_most = _token_times(row)
            notes = [f"{own_most}; {how(row['temperature'])}", f"plain: {half}, {most}"]
            name = f"of a token, median, {row['prompt_set'].replace('_', ' ')}"
            cards.append({"value": own_half, "label": name, "notes": notes})
            break
    return cards


def _token_times(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['token_ms_p50']:.3g} ms", f"99 of 100 within {row['token_ms_p99']:.3g} ms"


def _interval(best: Mapping[str, Any]) -> str:
    return f" (95 %: {span(best['speedup_interval'])})" if best["speedup_interval"] else ""


def _score_cards(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "value": percent(score["model"], 1),
            "label": f"{task(score)}, {score['metric']}",
            "notes": [
                *([f"base model {percent(score['base'], 1)}"] if score["base"] is not None else []),
                f"95 %: {span([100 * end for end in score['model_interval']], '.0f')}",
            ],
        }
        for score in summary["scores"]
        if score["model"] is not None and tells(score)
    ][:2]


def _method(part: Mapping[str, Any]) -> dict[str, Any]:
    machine, units, settings = part["hardware"], part["units"], part["settings"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    drafting = settings.get("draft") or {}
    models = {"model": settings["model"], "base": settings.get("base"), "draft model": drafting.get("model")}
    pairs = [
        *((name, folder) for name, folder in models.items() if folder),
        *([("adapter", GATED)] if part.get("gated") else []),
        ("measured", part["date"]),
        ("on", f"{device}, {machine['threads']} thread(s) a process, {part.get('ranks') or 1} process(es)"),
        ("with", ", ".join(f"{name} {version}" for name, version in part["versions"].items())),
        ("commit", part["commit"]),
        ("done", f"{units['done']} of {units['all']} units"),
    ]
    return {"pairs": pairs, "settings": list(dotted(settings))}


def _quality(part: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sandbox": part.get("sandbox"),
        "tables": quality_tables(part),
        "rules": [(benchmark(name), rule) for name, rule in part.get("rules", {}).items()],
        "skipped": [(task(entry), entry["reason"]) for entry in part["skipped"]],
    }


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a coloured text; on hovering a piece says who produced it."""
    pieces = [view.span(kind, text, title=view.meaning(kind)) for kind, text in sample["pieces"]]
    text = "".join([view.span("given", sample["before"]), *pieces, view.span("given", sample["after"])])
    name = sample.get("prompt_set") or benchmark(sample["benchmark"])
    title = [name, sample["id"], label({"k": 0, **sample})]
    title += [sample["dtype"]] if sample.get("dtype") else []
    title += [f"temperature {sample['temperature']:g}"] if sample.get("temperature") else []
    title += [sample["who"], sample["verdict"]] if "verdict" in sample else []
    return {"title": ", ".join(title), "text": Markup(text)}
