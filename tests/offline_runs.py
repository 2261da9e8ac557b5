"""Runs of W&B as offline files hold them, read by wandb's own reader of its log."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def records(file: Path) -> list[dict[str, Any]]:
    """Return every record of a run's log, which W&B may write some time after the run has ended."""
    command = [
        Path(sys.executable).with_name("wandb"),
        "leet",
        "inspect",
        "--json",
        file,
    ]
    for _ in range(20):
        output = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout
        parts = [json.loads(line) for line in output.splitlines()]
        if any(part["type"] == "exit" for part in parts):
            break
        time.sleep(1)
    return parts


def read_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the runs below a folder by their id, each of all its offline files in their order."""
    runs = dict[str, dict[str, Any]]()
    for file in sorted(folder.rglob("offline-run-*/run-*.wandb")):
        parts = records(file)
        items = {
            kind: [part[kind] for part in parts if part["type"] == kind]
            for kind in ("run", "summary", "history", "metric")
        }
        (begun,) = items["run"]
        empty = {"summary": {}, "history": [], "metrics": {}}
        run = runs.setdefault(begun["run_id"], empty)
        run["job_type"] = begun["job_type"]
        for summary in items["summary"]:
            run["summary"] |= summary.get("update", {})
        run["history"] += items["history"]
        for metric in items["metric"]:
            run["metrics"][metric.get("name") or metric["glob_name"]] = metric
    return runs
