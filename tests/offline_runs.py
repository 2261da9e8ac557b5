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
        (begun,) = (item["run"] for item in parts if item["type"] == "run")
        run = runs.setdefault(
            begun["run_id"],
            {"summary": {}, "history": [], "metrics": {}, "artifacts": []},
        )
        run |= {
            name: begun.get(name)
            for name in ("run_group", "job_type", "tags", "entity", "project")
        }
        run["summary"] |= _merged(
            item["summary"] for item in parts if item["type"] == "summary"
        )
        run["history"] += [
            item["history"] for item in parts if item["type"] == "history"
        ]
        run["metrics"] |= {
            item["metric"].get("name") or item["metric"]["glob_name"]: item["metric"]
            for item in parts
            if item["type"] == "metric"
        }
        run["artifacts"] += [
            item["artifact"] for item in parts if item["type"] == "artifact"
        ]
    return runs


def _merged(updates: Any) -> dict[str, Any]:
    result = dict[str, Any]()
    for item in updates:
        result |= item.get("update", {})
    return result
