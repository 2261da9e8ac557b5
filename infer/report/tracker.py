"""A report to Weights & Biases: its figures in the summary, its rows as tables, its plots as images."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import wandb

from conf.characters import print_line
from conf.tracker import TrackerConfig, begin_run, run_file
from infer.report.rows import flat, label

BEST = ("speedup", "speedup_interval", "tokens_per_second")
SPEED = (*BEST, "acceptance_rate", "mean_acceptance_length", "tokens_per_forward")


def log(tracker: TrackerConfig, folder: Path, report: dict[str, Any], plots: Sequence[str]) -> None:
    """Log a report that lies in `folder`, with those plots of it, to the run that it has, or a new one."""
    if tracker.mode == "disabled":
        return
    run = begin_run(
        tracker,
        folder,
        file=run_file(folder),
        name=f"{report['name']}-report",
        job_type="report",
        settings=_settings(report),
        tell=partial(print_line, error=True),
        linked=_linked(report),
    )
    images = {name: wandb.Image(str(folder / f"{name}.png")) for name in plots}
    tables = {kind: _table(report[kind]["rows"]) for kind in ("speed", "quality") if report[kind]}
    run.log({**tables, **images})
    told = {"sentence": report["summary"]["sentence"], "warnings": report["warnings"]}
    run.summary.update(told | scalars(report))
    run.finish()


def _settings(report: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("settings", "hardware", "versions", "commit")
    return {
        kind: {name: report[kind].get(name) for name in kept} for kind in ("speed", "quality") if report[kind]
    }


def scalars(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a report by names that W&B groups into sections.

    They are those of each decoder, of the best row of each prompt set as `best/`, and scores.
    """
    found = dict[str, Any]()
    for row in report["speed"]["rows"] if report["speed"] else ():
        name = label(row).replace(" ", "_")
        found |= _figures(f"speed/{_place(row)}/{name}", row, SPEED)
    for best in report["summary"]["best"]:
        found |= _figures(f"best/{_place(best)}", best, BEST)
    for row in report["quality"]["rows"] if report["quality"] else ():
        place = "/".join(filter(None, (row["benchmark"], row["language"], _heat(row))))
        found[f"quality/{place}/{row['metric'].replace(' ', '_')}/{row['who']}_{row['decoder']}"] = row["value"]
    return found


def _figures(place: str, row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the figures of a row that were measured, an interval as its two ends."""
    cells = flat({name: row.get(name) for name in names})
    return {f"{place}/{name}": value for name, value in cells.items() if value is not None}


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['prompt_set']}/{row['dtype']}/{_heat(row)}"


def _heat(row: Mapping[str, Any]) -> str:
    """Return the temperature as part of a name: W&B takes a dot for a level."""
    return f"temperature_{row['temperature']:g}".replace(".", "_")


def _linked(report: Mapping[str, Any]) -> Path | None:
    """Return the file of the run that exported the model that was measured."""
    folders = [report[kind]["settings"].get("model") for kind in ("speed", "quality") if report[kind]]
    paths = [Path(folder) for folder in folders if folder]
    return run_file(paths[0].parent, paths[0].name) if paths else None


def _table(rows: Sequence[dict[str, Any]]) -> wandb.Table:
    plain = [flat(row) for row in rows]
    columns: list[str | int] = list(dict.fromkeys(name for row in plain for name in row))
    return wandb.Table(columns=columns, data=[[row.get(str(name)) for name in columns] for row in plain])
