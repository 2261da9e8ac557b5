"""The model card: what it says, from which files, and that another model's report is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load

from conf import UserError
from conf.files import with_checksum
from conf.fingerprint import fingerprint
from conf.stage import write_manifest
from tests.train.export.export_fixture import AFTER, BEFORE, VERIFIED, training
from train.export import ExportConfig
from train.export.card import render_card, write_card
from train.export.publish import check_publication, publish
from train.export.sidecars import write_sidecars

Exported = tuple[Path, dict[str, Any]]
LATER = AFTER | {"step": 18, "standard_loss": 1.2}


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    """A finished model directory without weights, and the manifest of its training."""
    return export(tmp_path)


def export(folder: Path, **facts: Any) -> Exported:
    checkpoint, manifest = training(folder / "tuned", **facts)
    out = folder / "model"
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.bfloat16)
    write_card(
        out,
        render_card(
            out, manifest, step=9, verified=VERIFIED if manifest["adaptive"] else None
        ),
    )
    write_manifest(
        out, "model", {"settings": {}, "inputs": {}}, step=9, verified=VERIFIED
    )
    return out, manifest


MEASURED = {
    "hardware": {"gpu": "NVIDIA H200", "cpu": "", "threads": 1},
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    "date": "2026-11-21T15:27:15+00:00",
    "settings": {"dtype": "bfloat16"},
}


def row(decoder: str, speedup: float, **figures: Any) -> dict[str, Any]:
    return {
        "prompt_set": "humaneval",
        "temperature": 0.0,
        "decoder": decoder,
        "speedup": speedup,
        "speedup_interval": [speedup - 0.1, speedup + 0.1],
        "output_tokens_per_second": 100 * speedup,
        "verifications": 9,
        "mean_acceptance_length": 2.5,
        "same": 6,
        "compared": 6,
    } | figures


def speed() -> dict[str, Any]:
    rows = [
        row("plain", 1.0, verifications=0),
        row("hybrid", 2.0),
        row("ngrams", 1.5),
        row("hf assisted", 3.0),
    ]
    return {**MEASURED, "rows": rows}


def quality() -> dict[str, Any]:
    shared = {
        "benchmark": "humaneval",
        "decoder": "plain",
        "temperature": 0.0,
        "metric": "pass@1",
    }
    scores = [("model", 0.5, [0.45, 0.55]), ("base", 0.48, [0.43, 0.53])]
    rows = [
        {**shared, "who": who, "value": value, "interval": interval, "problems": 164}
        for who, value, interval in scores
    ]
    return {**MEASURED, "rows": rows}


def report_of(out: Path, folder: Path, **parts: Any) -> Path:
    """A finished report of a model directory."""
    for kind in parts:
        (folder / kind).mkdir(parents=True)
        manifest = {
            "schema": 1,
            "kind": kind,
            "inputs": {"model.path": fingerprint(out)},
        }
        (folder / kind / "manifest.json").write_text(json.dumps(manifest))
    report = {"name": "report", "speed": None, "quality": None, "gsd": None} | parts
    (folder / "report.json").write_text(json.dumps(with_checksum(report)))
    return folder


def test_the_front_matter_is_the_hubs(exported: Exported) -> None:
    assert metadata_load(exported[0] / "README.md") == {
        "base_model": "codellama/CodeLlama-7b-hf",
        "library_name": "transformers",
        "license": "llama2",
        "pipeline_tag": "text-generation",
        "tags": ["sdsat", "adaptive-tokens", "speculative-decoding"],
    }


def test_the_table_has_before_after_and_again(exported: Exported) -> None:
    card = (exported[0] / "README.md").read_text()
    assert (
        "| loss of a standard token, nats | 1.500 | 1.400 | 1.400 (1.300–1.500) |"
        in card
    )
    assert (
        "| draft of adaptive token 1 right | 8.0 % | 50.0 % | 50.0 % (45.0–55.0) |"
        in card
    )
    assert "| draft of adaptive token 2 right | 5.0 % | 40.0 % | 40.0 % |" in card
    assert (
        "weights equal the training's, and on 128 positions its logits do, to the last bit."
        in card
    )
    assert "model=MODEL" in card and "someone" not in card  # no path of this machine
    assert (
        "| infilling | PSM; ids:" in card
        and "| trained on | 12 documents, 3,456 tokens: py, go |" in card
    )


def test_a_model_without_adaptive_tokens_of_random_weights(tmp_path: Path) -> None:
    data = {"documents": 1, "tokens": 2, "modes": {}, "languages": []}
    out, manifest = export(tmp_path, adaptive=0, base={}, data=data)
    manifest["settings"]["model"]["random_init"] = True
    card = render_card(out, manifest, step=9, verified=None)
    assert (
        "without adaptive tokens" in card
        and "not read back" in card
        and "license" not in card
    )
    assert "| next token right | 60.0 % | 70.0 % |" in card
    absent = ("SDSAT", "sdsat", "accepted", "### Speed", "infilling", "Fine-tuned")
    assert not any(word in card for word in absent)


def test_a_base_model_without_a_name(tmp_path: Path) -> None:
    """The folder's last name stood there, without an empty line before it."""
    out, _ = export(tmp_path, base={})
    card = (out / "README.md").read_text()
    assert "\n# Llama of 2.67 million parameters with adaptive tokens\n" in card
    assert (
        "one by one.\n\nFine-tuned from a model whose folder states no name.\n\n| model |"
        in card
    )
    assert "- The folder of the base model stated no license" in card


@pytest.mark.parametrize(
    ("step", "row", "trained"),
    [
        (9, " 1.400 |\n", "step 9 of 18 on"),
        (18, " 1.200 |\n", "step 18 on"),
        (12, "\n", "step 12 of 18 on"),
    ],
)
def test_figures_are_of_the_exported_checkpoint(
    exported: Exported, step: int, row: str, trained: str
) -> None:
    """Those of the last step were shown when its checkpoint was broken and an older one was exported."""
    out, manifest = exported
    manifest |= {"step": 18, "validation": [BEFORE, AFTER, LATER]}
    card = render_card(out, manifest, step=step, verified=None)
    assert (
        f"| loss of a standard token, nats | 1.500 |{row}" in card
        and f"| trained | {trained}" in card
    )
    assert (
        "before training alone, since this step's checkpoint was not validated." in card
    ) == (step == 12)


def test_a_report_does_not_change_the_step(exported: Exported, tmp_path: Path) -> None:
    """A finished directory's step is its own manifest's: its checkpoint may be gone."""
    out, manifest = exported
    manifest |= {"step": 18, "validation": [BEFORE, AFTER, LATER]}
    report = report_of(out, tmp_path / "report", speed=speed())
    publish(ExportConfig("tuned", str(out), report=str(report)), manifest)
    assert "| trained | step 9 of 18 on" in (out / "README.md").read_text()


@pytest.mark.parametrize("gated", [True, False])
def test_an_adapter_beside_the_weights_is_mentioned(
    exported: Exported, gated: bool
) -> None:
    """Without it the weights are the base model's, which is all that a server reads."""
    out, manifest = exported
    (out / "adapter").mkdir()
    manifest["settings"]["lora"] = {"rank": 4, "gated": gated}
    card = render_card(out, manifest, step=9, verified=None)
    assert (
        "acts on adaptive tokens alone" in card,
        "export with `lora=merged`" in card,
    ) == (gated, not gated)
    assert "| LoRA | rank 4" in card


def test_the_hubs_name_is_in_the_commands(exported: Exported) -> None:
    out, manifest = exported
    (out / "custom_generate").mkdir()
    card = render_card(out, manifest, step=9, verified=None, push="someone/fast-7b")
    assert "# fast-7b\n" in card and "MODEL" not in card
    assert 'custom_generate="someone/fast-7b", trust_remote_code=True' in card
    assert (
        'from_pretrained("someone/fast-7b", dtype="auto", trust_remote_code=True)'
        in card
    )


def test_logits_that_differ_are_mentioned(exported: Exported) -> None:
    verified = {**VERIFIED, "logit_difference": 0.0123, "agreement": 0.9921}
    card = render_card(exported[0], exported[1], step=9, verified=verified)
    assert "by 0.012 at most" in card and "the same in 99.2 % of them" in card


def test_a_report_goes_into_the_card(exported: Exported, tmp_path: Path) -> None:
    out, manifest = exported
    report = report_of(out, tmp_path / "report", speed=speed(), quality=quality())
    config = ExportConfig("tuned", str(out), report=str(report))
    check_publication(config, finished=True)
    before = (out / "manifest.json").read_bytes()
    publish(config, manifest)
    card = (out / "README.md").read_text()
    assert (
        "| humaneval | 0 | hybrid | 100 | 200 | 2.00 (1.90–2.10) | 2.50 | 6/6 |" in card
    )
    assert "NVIDIA H200; torch 2.13.0, transformers 5.23.0; 2026-11-21" in card
    assert "| humaneval | pass@1 | 0 | 164 | 48.0 % | 50.0 % (45.0–55.0) |" in card
    assert (out / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("parts", [{"speed": speed()}, {"quality": quality()}])
def test_half_a_report_is_enough(
    exported: Exported, tmp_path: Path, parts: dict[str, Any]
) -> None:
    report = report_of(exported[0], tmp_path / "report", **parts)
    card = render_card(
        exported[0], exported[1], step=9, verified=None, report=str(report)
    )
    assert ("### Speed" in card, "### Quality" in card) == (
        "speed" in parts,
        "quality" in parts,
    )


def test_another_models_report_is_refused(exported: Exported, tmp_path: Path) -> None:
    out, manifest = exported
    report = report_of(out, tmp_path / "report", speed=speed())
    before = (out / "README.md").read_bytes()

    def check(folder: Path, message: str, *, finished: bool = True) -> None:
        with pytest.raises(UserError, match=message):
            check_publication(
                ExportConfig("t", str(out), report=str(folder)), finished=finished
            )

    check(report, "must be of the finished directory", finished=False)
    check(
        tmp_path / "absent",
        r"must be a folder that infer\.bench wrote, got no report\.json",
    )
    (report / "speed" / "manifest.json").write_text(
        '{"kind": "speed", "inputs": {"model.path": "0"}}'
    )
    check(report, "got a report of another model")
    (report / "speed" / "manifest.json").unlink()
    check(report, "finished folder of kind 'speed'")
    (report / "report.json").write_text("{")
    check(report, r"report\.json.* a JSON object")
    assert (out / "README.md").read_bytes() == before
