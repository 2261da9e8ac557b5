"""What a training folder says of how a model was made: recipe, data, curves and times, kept with the report."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf import UserError
from conf.files import read_result
from conf.stage import MANIFEST, read_manifest
from infer.report.rows import dotted, number
from infer.report.tables import table

FILE = "training.json"  # in the report's folder
SCHEMA = 1
LOG = "log.jsonl"  # of train: a line for each step
POINTS = 100  # of a curve, at most
LOSSES = ("standard_loss", "masked_loss", "accepted")
RECIPE = {  # settings that say most, by what the page calls them
    "objective.name": "objective",
    "objective.L": "widest window, L",
    "objective.w": "weight of adaptive tokens' loss",
    "data.own_share": "share of the model's own text",
    "steps": "steps",
    "global_batch": "sequences a step",
    "optimizer.lr": "learning rate",
    "lora.rank": "LoRA rank",
}


def read_training(folder: Path) -> dict[str, Any]:
    """Return the training section of a report from a finished folder of train. Raises UserError."""
    manifest = read_manifest(folder, "checkpoint", "training")
    data = Path(manifest.get("places", {}).get("data.path", ""))
    shards = read_result(data / MANIFEST) if (data / MANIFEST).is_file() else {}
    log = _read_log(folder / LOG)
    settings, length = manifest["settings"], shards.get("seq_len")
    tokens = settings["global_batch"] * length if length else None
    return {
        "schema": SCHEMA,
        "name": folder.resolve().name,
        "settings": settings,
        "parameters": manifest["parameters"],
        "ranks": manifest["ranks"],
        "data": manifest["data"],
        "validation": manifest["validation"],
        "log": _thinned(log),
        "tokens": tokens and tokens * manifest["step"],
        "stages": {
            "data_prep": shards.get("seconds"),
            "training": tokens and sum(tokens / row["tokens_per_second"] for row in log),
        },
        "commit": manifest["commit"],
        "date": manifest["created"],
    }


def kept_training(folder: Path) -> dict[str, Any] | None:
    """Return the section of a report's folder; None where there is none. Raises UserError."""
    if not (folder / FILE).is_file():
        return None
    section = read_result(folder / FILE)
    if section.get("schema") != SCHEMA:
        raise UserError(
            f"{folder / FILE}: schema must be {SCHEMA}, got {section.get('schema')}. Write it again with "
            "training=DIR"
        )
    return section


def _read_log(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step; of a step that was repeated after an interruption the last ones."""
    by_step = dict[int, dict[str, Any]]()
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            by_step[row["step"]] = row
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} must be the log of a training, a JSON object for each step") from error
    return [by_step[step] for step in sorted(by_step)]


def _thinned(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    size = -(-len(log) // POINTS) or 1
    parts = [log[at : at + size] for at in range(0, len(log), size)]
    return [
        {"step": part[-1]["step"]}
        | {
            name: sum(values) / len(values)
            for name in LOSSES
            if (values := [row[name] for row in part if row.get(name) is not None])
        }
        for part in parts
    ]


def training_facts(section: Mapping[str, Any], times: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the section as the page shows it; `times` are further stages' seconds."""
    settings, data = dict(dotted(section["settings"])), section["data"]
    recipe = [(text, settings[name]) for name, text in RECIPE.items() if settings.get(name) not in (None, 0)]
    own = data.get("own") or {}
    of_data = [
        ("documents", f"{data['documents']:,}"),
        ("tokens", f"{data['tokens']:,}"),
        ("languages", ", ".join(data["languages"])),
        ("the model's own text", f"{own['tokens']:,} tokens" if own else "none"),
        ("decontaminated of", ", ".join(data["decontaminated"]) or "nothing"),
    ]
    seconds = {name: value for name, value in {**section["stages"], **times}.items() if value}
    rows = [
        [f"{row['step']:,}", *(number(row.get(name), ".3f") for name in LOSSES)]
        for row in section["validation"]
    ]
    return {
        "name": section["name"],
        "recipe": [
            ("parameters", f"{section['parameters']:,}"),
            *recipe,
            *([("tokens seen", f"{section['tokens']:,}")] if section["tokens"] else []),
            ("processes", section["ranks"]),
        ],
        "data": of_data,
        "validation": table(
            "Held-out data", ["step", "loss", "loss of adaptive tokens", "accepted in a row"], rows
        ),
        "times": [(name, elapsed(value)) for name, value in seconds.items()],
        "settings": list(settings.items()),
    }


def elapsed(seconds: float) -> str:
    """Return a time as a person says it: 41 s, 3 min 20 s, 5 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
