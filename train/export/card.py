"""Write README.md of a model directory, the model card that a hub shows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from conf.errors import UserError
from conf.runs.files import read_json, read_result, write_bytes
from conf.runs.fingerprint import fingerprint
from conf.runs.stage import read_manifest
from data_prep.ngrams import TABLE
from train.config import ADAPTIVE
from train.export import UNO, trained_lora, trained_mask
from train.metrics import first_and_last, since

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md.j2")
TAGS = ["sdsat", "adaptive-tokens", "speculative-decoding"]


def write_card(
    out: Path,
    manifest: Mapping[str, Any],
    *,
    step: int,
    verified: Mapping[str, Any] | None,
    report: str | None = None,
) -> None:
    """Write the card of the model directory `out`.

    `manifest` is the training's. `verified` is the result of the verification, as in the
    directory's manifest. `report` is a report folder for this directory. Raise UserError
    if the report is of another model.
    """
    base = manifest["base"] or {}
    mask = trained_mask(manifest)
    adaptive = [mask] if isinstance(mask, int) else manifest["adaptive"]
    gated = trained_lora(manifest).gated
    adapter = (out / "adapter").is_dir()
    metadata = card_metadata(
        base, library="transformers", tags=TAGS if mask is not None else None
    )
    after = validation_at(manifest, step)
    rows = [row for row in manifest["validation"] if row["step"] <= step]
    # The step may have no validation: then its column is empty.
    measured = first_and_last(rows) if after else [rows[0], {}]
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        manifest=manifest,
        base=base,
        drafts=mask is not None,
        mask=None if mask == ADAPTIVE else mask,
        adaptive=adaptive,
        uno=(out / UNO).is_dir(),
        gated=gated,
        parallel=len(adaptive) == 1 and not adapter,
        config=read_json(out / "config.json"),
        adapter=adapter,
        custom_generate=(out / "custom_generate").is_dir(),
        table=(out / TABLE).is_file(),
        step=step,
        measured=measured,
        since=since(measured[0]),
        verified=verified,
        report=read_report(report, out) if report else {},
    )
    write_bytes(out / CARD, str(card).encode())


def card_metadata(
    base: Mapping[str, Any], *, library: str, tags: list[str] | None
) -> ModelCardData:
    """Return the front matter of a card; `base` is that of the training's manifest."""
    return ModelCardData(
        base_model=base.get("hub"),
        library_name=library,
        license=base.get("license"),
        license_name=base.get("license_name"),
        license_link=base.get("license_link"),
        pipeline_tag="text-generation",
        tags=tags,
    )


def validation_at(manifest: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the held-out metrics of a step; {} if the step has no validation."""
    return next((row for row in manifest["validation"] if row["step"] == step), {})


def read_report(folder: str, model: Path) -> dict[str, Any]:
    """Return infer.bench's report. Raise UserError if it is not of the directory `model`."""
    file = Path(folder) / "report.json"
    if not file.is_file():
        raise UserError(
            f"report={folder} must be a folder of infer.bench, got no {file.name}. "
            f"Run python -m infer.bench model={model} out={folder}"
        )
    report = read_result(file)
    for kind in ("speed", "quality"):
        if report[kind]:
            measured = read_manifest(Path(folder) / kind, kind, "report")
            if measured["inputs"].get("model") != fingerprint(model):
                raise UserError(
                    f"report={folder} must be of {model}, got a report of another model. "
                    "Rerun infer.bench with this model."
                )
    return report
