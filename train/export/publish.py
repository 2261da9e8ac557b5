"""What becomes of a finished model directory: a card with a report's figures, the hub, Weights & Biases."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf import UserError
from conf.characters import print_line
from conf.stage import read_manifest
from conf.tracker import run_file
from train.export.card import CARD, PLACE, named, render_card, write_card
from train.export.config import ExportConfig
from train.export.push import check_push, push
from train.export.report import read_report


def check_asked(config: ExportConfig, manifest: dict[str, Any], *, finished: bool) -> None:
    """Raises UserError, before anything is done, for a report or a place on the hub that cannot be used.

    A report belongs to the very directory that it was measured of: there is none before that is finished.
    """
    if config.report and not finished:
        raise UserError(
            f"report={config.report}: wanted out to be the finished directory that it was measured of, found "
            f"{config.out} not exported yet"
        )
    if config.report:
        read_report(config.report, Path(config.out))
    if config.push and finished and not config.report:
        _is_of_another(Path(config.out), manifest, config.push)
    if config.push:
        check_push(config.push, private=config.private)


def publish(config: ExportConfig, manifest: dict[str, Any]) -> None:
    """Of a finished directory: write its card again for a report or another name, push it where asked."""
    out, told = Path(config.out), None
    if config.report:
        told = f"the figures of {config.report}"
    elif config.push and _is_of_another(out, manifest, config.push):
        told = f"the name {config.push}"
    if told:
        write_card(
            out, render_card(out, manifest, **_exported(out, manifest), report=config.report, push=config.push)
        )
        print_line(f"export: wrote {out / CARD} with {told}")
    if config.push:
        print_line(f"export: pushed to {push(out, config.push, private=config.private)}")


def _is_of_another(out: Path, manifest: dict[str, Any], repo: str) -> bool:
    """Whether the card, as it was written, has another name than that on the hub.

    Raises UserError where it has, and holds what it could not be written again with: its author's words, or
    a report's figures.
    """
    found = named(out)
    if found is None or found == repo:
        return False
    written = render_card(out, manifest, **_exported(out, manifest), push=None if found == PLACE else found)
    if (out / CARD).read_bytes() == written.encode():
        return True
    if found == PLACE:  # of which the card says that it stands for any name
        return False
    raise UserError(
        f"push={repo}: wanted a card of that name, found {found} in {out / CARD}, which was edited or has a "
        f"report's figures: write {repo} there, or give report=DIR, with which the card is written anew"
    )


def _exported(out: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the directory's manifest says of the export; earlier versions took the last step and kept none."""
    made = read_manifest(out, "model", "out")
    return {"step": made.get("step", manifest["step"]), "verified": made.get("verified")}


def track(config: ExportConfig) -> None:
    """Log the finished directory, in the group of the training that it was made of.

    W&B's files lie beside the directory, which holds nothing but the model.
    """
    from train.metrics import Tracker  # and with it W&B, for those alone who track

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
