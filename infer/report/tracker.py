"""A report to Weights & Biases: its rows as tables, its plots as images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from conf.characters import print_line
from conf.errors import visible
from conf.tracker import TrackerConfig, keep_within
from infer.report.rows import flat

ONLINE_SECONDS = 30  # for W&B to answer, before the report goes on without it


def log(tracker: TrackerConfig, folder: Path, report: dict[str, Any], plots: Sequence[str]) -> None:
    """Log a report that lies in `folder`, with those plots of it; offline where W&B does not answer."""
    if tracker.mode == "disabled":
        return
    run = _begin(tracker, folder, report)
    images = {name: wandb.Image(str(folder / f"{name}.png")) for name in plots}
    tables = {kind: _table(report[kind]["rows"]) for kind in ("speed", "quality") if report[kind]}
    run.log({**tables, **images})
    run.summary.update({"sentence": report["summary"]["sentence"], "warnings": report["warnings"]})
    run.finish()


def _begin(tracker: TrackerConfig, folder: Path, report: dict[str, Any]) -> Any:
    kept = ("settings", "hardware", "versions", "commit")
    config = {
        kind: {name: report[kind].get(name) for name in kept} for kind in ("speed", "quality") if report[kind]
    }

    def begin(mode: Any) -> Any:
        return wandb.init(
            project=tracker.project,
            name=visible(f"{report['name']}-report"),
            mode=mode,
            dir=str(folder),
            config=config,
            settings=wandb.Settings(silent=True, console="off", init_timeout=ONLINE_SECONDS),
        )

    keep_within(folder)
    try:
        return begin(tracker.mode)
    except wandb.errors.Error as error:
        told = f"tracker.mode={tracker.mode}: {str(error).splitlines()[0]}; the report is logged offline"
        print_line(told, error=True)
        return begin("offline")


def _table(rows: Sequence[dict[str, Any]]) -> wandb.Table:
    plain = [flat(row) for row in rows]
    columns: list[str | int] = list(dict.fromkeys(name for row in plain for name in row))
    return wandb.Table(columns=columns, data=[[row.get(str(name)) for name in columns] for row in plain])
