"""What becomes of a finished model directory: its card with a report's figures, and a copy on the hub."""

from pathlib import Path
from typing import Any

from conf import UserError
from conf.stage import read_manifest
from train.export.card import write_card
from train.export.config import ExportConfig
from train.export.push import check_push, push
from train.export.report import read_report


def check_asked(config: ExportConfig, *, finished: bool) -> None:
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
    if config.push:
        check_push(config.push, private=config.private)


def publish(config: ExportConfig, manifest: dict[str, Any]) -> None:
    """Of a finished directory: write its card again where a report is given, push it where asked."""
    out = Path(config.out)
    if config.report:
        verified = read_manifest(out, "model", "out").get("verified")
        write_card(out, manifest, verified=verified, report=config.report, push=config.push)
        print(f"export: wrote {out / 'README.md'} with the figures of {config.report}")
    if config.push:
        print(f"export: pushed to {push(out, config.push, private=config.private)}")
