"""The model card: what it says, from which files, and that another model's report is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load

from conf import UserError
from conf.fingerprint import fingerprint
from conf.stage import write_manifest
from infer.report.write import write
from tests.infer.report.report_fixture import quality, speed, write_parts
from tests.train.export.export_fixture import AFTER, BEFORE, VERIFIED, training
from train.export.card import render_card, write_card
from train.export.config import ExportConfig
from train.export.publish import check_asked, publish
from train.export.sidecars import write_sidecars


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A finished model directory without weights, and the manifest of its training."""
    return finished(tmp_path)


def finished(folder: Path, **facts: Any) -> tuple[Path, dict[str, Any]]:
    checkpoint, manifest = training(folder / "tuned", **facts)
    out = folder / "model"
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.bfloat16)
    write_card(out, render_card(out, manifest, step=9, verified=VERIFIED if manifest["adaptive"] else None))
    write_manifest(out, "model", {"settings": {}, "inputs": {}}, step=9, verified=VERIFIED)
    return out, manifest


def report_of(out: Path, folder: Path, **parts: Any) -> Path:
    """A finished report that was measured of a model directory."""
    write_parts(folder, **parts)
    for kind in parts:
        told = {"schema": 1, "kind": kind, "inputs": {"model": fingerprint(out)}}
        (folder / kind / "manifest.json").write_text(json.dumps(told))
    write(folder)
    return folder


def test_the_front_matter_is_the_hubs(made: tuple[Path, dict[str, Any]]) -> None:
    assert metadata_load(made[0] / "README.md") == {
        "base_model": "codellama/CodeLlama-7b-hf",
        "library_name": "transformers",
        "license": "llama2",
        "pipeline_tag": "text-generation",
        "tags": ["sdsat", "adaptive-tokens", "speculative-decoding"],
    }


def test_the_table_has_before_after_and_again(made: tuple[Path, dict[str, Any]]) -> None:
    card = (made[0] / "README.md").read_text()
    assert "| loss of a standard token, nats | 1.500 | 1.400 | 1.400 (1.300–1.500) |" in card
    assert "| draft of adaptive token 1 right | 8.0 % | 50.0 % | 50.0 % (45.0–55.0) |" in card
    assert "| draft of adaptive token 2 right | 5.0 % | 40.0 % | 40.0 % |" in card
    assert "weights are the training's, and on 128 positions its logits, to the last bit." in card
    assert "model=MODEL" in card and "someone" not in card  # no path of this machine
    assert "| infilling | PSM; ids:" in card and "| trained on | 12 documents, 3,456 tokens: py, go |" in card


def test_what_was_not_done_is_not_told(tmp_path: Path) -> None:
    """A model without adaptive tokens, of random weights, and not read back."""
    out, manifest = finished(
        tmp_path, adaptive=0, base={}, data={"documents": 1, "tokens": 2, "modes": {}, "languages": []}
    )
    manifest["settings"]["model"]["random_init"] = True
    write_card(out, render_card(out, manifest, step=9, verified=None))
    card = (out / "README.md").read_text()
    assert "without adaptive tokens" in card and "not read back" in card and "license" not in card
    assert "| next token right | 60.0 % | 70.0 % |" in card
    assert not any(
        word in card for word in ("SDSAT", "sdsat", "accepted", "### Speed", "infilling", "Fine-tuned")
    )


def test_a_base_model_without_a_name_is_given_none(tmp_path: Path) -> None:
    """The folder's last name stood there, behind the paragraph before it without an empty line between."""
    out, _ = finished(tmp_path, base={})
    card = (out / "README.md").read_text()
    assert "\n# Llama of 2.67 million parameters with adaptive tokens\n" in card
    assert "one by one.\n\nFine-tuned from a model whose folder tells no name.\n\n| model |" in card
    assert "- The folder of the base model stated no license" in card


def test_the_figures_are_of_the_checkpoint_that_was_taken(made: tuple[Path, dict[str, Any]]) -> None:
    """Those of the last step were shown where its checkpoint was broken and an older one was exported."""
    out, manifest = made
    manifest["step"], manifest["validation"] = 18, [BEFORE, AFTER, AFTER | {"step": 18, "standard_loss": 1.2}]
    write_card(out, render_card(out, manifest, step=9, verified=None))
    card = (out / "README.md").read_text()
    assert (
        "| loss of a standard token, nats | 1.500 | 1.400 |\n" in card and "| trained | step 9 of 18 on" in card
    )
    write_card(out, render_card(out, manifest, step=18, verified=None))
    card = (out / "README.md").read_text()
    assert "| loss of a standard token, nats | 1.500 | 1.200 |\n" in card and "| trained | step 18 on" in card
    write_card(out, render_card(out, manifest, step=12, verified=None))
    card = (out / "README.md").read_text()
    assert "before training alone, since this step's checkpoint was not validated." in card
    assert "| loss of a standard token, nats | 1.500 |\n" in card


def test_a_report_does_not_change_the_step(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A finished directory's step is its own manifest's: its checkpoint may be gone."""
    out, manifest = made
    manifest["step"], manifest["validation"] = 18, [BEFORE, AFTER, AFTER | {"step": 18, "standard_loss": 1.2}]
    report = report_of(out, tmp_path / "report", speed=speed())
    publish(ExportConfig("tuned", str(out), report=str(report)), manifest)
    assert "| trained | step 9 of 18 on" in (out / "README.md").read_text()


@pytest.mark.parametrize("gated", [True, False])
def test_an_adapter_beside_the_weights_is_told(tmp_path: Path, gated: bool) -> None:
    """Without it the weights are the base model's, which is all that a server reads."""
    out, manifest = finished(tmp_path)
    (out / "adapter").mkdir()
    manifest["settings"]["lora"] = {"rank": 4, "gated": gated}
    write_card(out, render_card(out, manifest, step=9, verified=None))
    card = (out / "README.md").read_text()
    assert ("acts on adaptive tokens alone" in card, "export with `lora=merged`" in card) == (gated, not gated)
    assert "| LoRA | rank 4" in card


def test_the_hubs_name_stands_in_the_commands(made: tuple[Path, dict[str, Any]]) -> None:
    out, manifest = made
    (out / "custom_generate").mkdir()
    write_card(out, render_card(out, manifest, step=9, verified=None, push="someone/fast-7b"))
    card = (out / "README.md").read_text()
    assert "# fast-7b\n" in card and "MODEL" not in card
    assert 'custom_generate="someone/fast-7b", trust_remote_code=True' in card
    assert 'from_pretrained("someone/fast-7b", dtype="auto", trust_remote_code=True)' in card


def test_logits_that_differ_are_told(made: tuple[Path, dict[str, Any]]) -> None:
    verified = {**VERIFIED, "logit_difference": 0.0123, "agreement": 0.9921}
    write_card(made[0], render_card(made[0], made[1], step=9, verified=verified))
    card = (made[0] / "README.md").read_text()
    assert "by 0.012 at most" in card and "the same in 99.2 % of them" in card


def test_a_report_goes_into_the_card(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, manifest = made
    report = report_of(out, tmp_path / "report", speed=speed(), quality=quality())
    config = ExportConfig("tuned", str(out), report=str(report))
    check_asked(config, manifest, finished=True)
    before = (out / "manifest.json").read_bytes()
    publish(config, manifest)
    card = (out / "README.md").read_text()
    best = json.loads((report / "report.json").read_text())["summary"]["best"]
    assert len(best) == 9 and card.count("\n| humaneval | ") == 3
    for one in best:
        ends = "–".join(format(end, ".2f") for end in one["speedup_interval"])
        assert f"| {one['label']} |" in card and f"{one['speedup']:.2f} ({ends})" in card
    assert "NVIDIA H200; torch 2.13.0, transformers 5.23.0; 2026-11-21" in card
    assert "| humaneval python | pass@1 | 0 | 164 |" in card and "45.0–55.0" in card
    assert (out / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    "parts", [{"speed": speed()}, {"quality": quality(base=False)}], ids=["speed", "quality"]
)
def test_half_a_report_will_do(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, parts: dict[str, Any]
) -> None:
    report = report_of(made[0], tmp_path / "report", **parts)
    write_card(made[0], render_card(made[0], made[1], step=9, verified=None, report=str(report)))
    card = (made[0] / "README.md").read_text()
    assert ("### Speed" in card, "### Quality" in card) == ("speed" in parts, "quality" in parts)


def test_a_report_that_is_none_of_this_model_is_refused(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, manifest = made
    report = report_of(out, tmp_path / "report", speed=speed())
    before = (out / "README.md").read_bytes()

    def refused(folder: Path, told: str, *, finished: bool = True) -> None:
        with pytest.raises(UserError, match=told):
            check_asked(ExportConfig("tuned", str(out), report=str(folder)), manifest, finished=finished)

    refused(report, "wanted out to be the finished directory that it was measured of", finished=False)
    refused(tmp_path / "absent", r"wanted a folder that infer\.report wrote, found no report\.json")
    (report / "speed" / "manifest.json").write_text('{"kind": "speed", "inputs": {"model": "0"}}')
    refused(report, "found another model's")
    (report / "speed" / "manifest.json").unlink()
    refused(report, "must be a finished folder of kind 'speed'")
    (report / "report.json").write_text('{"schema": 1}')
    refused(report, r"report\.json: wanted a report of schema 2, found schema 1")
    (report / "report.json").write_text("{")
    refused(report, r"report\.json must be a JSON object")
    assert (out / "README.md").read_bytes() == before


def test_settings_are_checked_at_the_start() -> None:
    for name in ("model", "a/b/c", "a b/c", "/c", "https://huggingface.co/a/b"):
        with pytest.raises(ValueError, match="push: wanted a name on the hub as ORG/NAME"):
            ExportConfig("tuned", "model", push=name)
