"""A finished export to Weights & Biases: what was verified, and the model directory as an artifact."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.stage import read_manifest
from conf.tracker import run_file
from train.export.config import ExportConfig
from train.monitor.tracker import Tracker


def track(config: ExportConfig) -> None:
    """Log the finished directory, in the group of the training that it was made of.

    W&B's files lie beside the directory, which holds nothing but the model.
    """
    out = Path(config.out).resolve()
    tracker = Tracker(
        config.tracker,
        out=out.parent,
        name=f"{out.name}-export",
        settings=asdict(config),
        speaks=True,
        job_type="export",
        file=run_file(out.parent, out.name),
        linked=run_file(Path(config.checkpoint)),
    )
    tracker.summarise(_figures(read_manifest(out, "model", "out")))
    if config.artifact:
        tracker.log_folder(out, out.name)
    tracker.finish()


def _figures(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured of the directory, as read back."""
    verified = manifest["verified"] or {}
    names = ("weights", "logit_difference", "agreement", "sequences")
    return {
        "parameters": manifest["parameters"],
        "step": manifest["step"],
        **{f"verified/{name}": verified[name] for name in names if name in verified},
        **{f"verified/{name}": value for name, value in verified.get("measured", {}).items()},
        **{f"drafts/{name}": value for name, value in verified.get("drafts", {}).items()},
    }
