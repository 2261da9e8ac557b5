"""Test the model card of a finished model directory."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from conf.errors import UserError
from conf.runs.files import with_checksum, write_json
from conf.runs.fingerprint import fingerprint
from conf.runs.stage import collect_provenance, write_manifest
from conf.settings.compose import settings
from tests.train.export.export_fixture import VERIFIED, training
from train.export import ExportConfig
from train.export.__main__ import main
from train.export.card import write_card
from train.export.sidecars import write_sidecars


def export(folder: Path, **facts: Any) -> tuple[Path, dict[str, Any]]:
    """Write a finished model directory without weights; return it and its training's manifest."""
    checkpoint, manifest = training(folder / "tuned", **facts)
    out = folder / "model"
    out.mkdir()
    write_sidecars(checkpoint, out, manifest, step=9, dtype=torch.bfloat16)
    verified = VERIFIED if manifest["adaptive"] else None
    write_card(out, manifest, step=9, verified=verified)
    config = ExportConfig(str(checkpoint), str(out))
    ignored = ["report", "tracker"]
    origin = collect_provenance(config, {"checkpoint": checkpoint}, ignore=ignored)
    write_manifest(out, "model", origin, step=9, verified=verified)
    return out, manifest


def export_again(out: Path, *overrides: str) -> None:
    """Run the export command on the finished directory."""
    args = [f"checkpoint={out.with_name('tuned')}", f"out={out}", *overrides]
    args.append("tracker.mode=disabled")
    main(settings("export", ExportConfig, args))


def card_of(out: Path) -> str:
    return (out / "README.md").read_text()


def report_of(out: Path, folder: Path) -> Path:
    """Write a report of a model directory into `folder`, and return the folder."""
    common = {"hardware": {"gpu": "H200"}, "date": "2026-11-21T15:27:15+00:00"}
    common["settings"] = {"dtype": "bfloat16"}
    speed = {"prompt_set": "humaneval", "temperature": 0.0, "decoder": "hybrid"}
    speed |= {"output_tokens_per_second": 200, "speedup": 2.0, "same": 6, "compared": 6}
    speed |= {"mean_acceptance_length": 2.5, "speedup_interval": [1.5, 2.5]}
    speed["marks"] = ["machine busy"]
    report = {"speed": {**common, "rows": [speed]}, "quality": None}
    (folder / "speed").mkdir(parents=True)
    manifest = {"kind": "speed", "inputs": {"model": fingerprint(out)}}
    write_json(folder / "speed" / "manifest.json", manifest)
    write_json(folder / "report.json", with_checksum(report))
    return folder


def test_a_training_without_held_out_windows_is_exported(tmp_path: Path) -> None:
    """Bug: held-out answers too short for a window ended the export in a traceback."""
    validation = [
        {"step": step, "sequences": 1, "standard_loss": 1.5} for step in (0, 9)
    ]
    out, _ = export(tmp_path, validation=validation)
    card = card_of(out)
    assert "| mean loss per token, nats | 1.500 | 1.500 |" in card
    assert "expected accepted drafts" not in card


def test_the_card_has_metadata_figures_and_commands(tmp_path: Path) -> None:
    out, _ = export(tmp_path)
    assert ModelCard.load(out / "README.md").data.to_dict() == {
        "base_model": "codellama/CodeLlama-7b-hf",
        "library_name": "transformers",
        "license": "llama2",
        "pipeline_tag": "text-generation",
        "tags": ["sdsat", "adaptive-tokens", "speculative-decoding"],
    }
    card = card_of(out)
    assert "| mean loss per token, nats | 1.500 | 1.400 |" in card
    assert (
        "accepted drafts per verification, of 2 by adaptive tokens | 0.100 | 0.900 |"
        in card
    )
    assert "someone" not in card  # no path of this machine
    assert "transformers serve MODEL" in card
    (drafting,) = re.findall(r"--speculative-config '(.*)'", card)
    assert json.loads(drafting) == {
        "method": "draft_model",
        "model": "MODEL",
        "num_speculative_tokens": 3,  # the next token, and L drafts
        "parallel_drafting": True,
    }


def test_the_card_of_a_kept_adapter_loads_the_adapter(tmp_path: Path) -> None:
    """Bug: the commands for an ungated adapter beside the weights ran the base model."""
    out, manifest = export(tmp_path)
    plain = card_of(out)
    (out / "adapter").mkdir()
    write_card(out, manifest, step=9, verified=None)
    card = card_of(out)
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    compile(program, "card", "exec")
    (others,) = re.findall(r"```python\n(.*?)```", plain, re.DOTALL)
    added = set(program.splitlines()) - set(others.splitlines())
    assert added == {
        "from peft import PeftModel",
        'model = PeftModel.from_pretrained(model, "MODEL/adapter")',
    }
    assert "serve MODEL" in plain and "serve MODEL" not in card


def test_the_card_names_the_share_of_own_text(tmp_path: Path) -> None:
    """Bug: a model that was trained on its base's text seemed to be trained on documents alone."""
    data = {"documents": 9, "tokens": 1234, "languages": ["py"], "decontaminated": None}
    own = {"documents": 5, "tokens": 600, "share": 0.25}
    out, _ = export(tmp_path, data={**data, "own": own})
    sentence = (
        "Trained on 9 documents, 1,234 tokens: py. 25 % of each step were text of the base "
        "model: 5 documents, 600 tokens.\n"
    )
    assert sentence in card_of(out)


def test_a_later_first_validation_is_not_called_before(tmp_path: Path) -> None:
    """Bug: the loss of 16 held-out sequences was "before", the loss of two different sequences "after"."""
    row = {"standard_loss": 1.5, "accepted": 0.1, "sequences": 2}
    validation = [
        {**row, "step": 0, "sequences": 16, "standard_loss": 6.0},
        {**row, "step": 4},
        {**row, "step": 9, "standard_loss": 1.4},
    ]
    card = card_of(export(tmp_path, validation=validation)[0])
    assert "| | at step 4 | after |" in card
    assert "| mean loss per token, nats | 1.500 | 1.400 |" in card


def test_one_validation_has_one_column(tmp_path: Path) -> None:
    """Bug: with steps=0 the figures of the mean of adapters were "before" and "after" training."""
    row = {"step": 9, "sequences": 2, "standard_loss": 1.5, "accepted": 0.1}
    card = card_of(export(tmp_path, validation=[row])[0])
    assert "with drafts as in decoding:\n\n| | value |\n|---|---:|\n" in card
    assert "| mean loss per token, nats | 1.500 |\n" in card
    assert "of 2 by adaptive tokens | 0.100 |\n" in card


def test_a_report_goes_into_the_card(tmp_path: Path) -> None:
    out, _ = export(tmp_path)
    report = report_of(out, tmp_path / "report")
    before = (out / "manifest.json").read_bytes()
    export_again(out, f"report={report}")
    card = card_of(out)
    assert "| humaneval | 0 | hybrid | 200? | 2.00? (1.50–2.50) | 2.50 | 6/6 |" in card
    assert "the machine was busy" in card
    assert "H200, 2026-11-21" in card
    assert (out / "manifest.json").read_bytes() == before
    # Bug: "report.json must be a JSON object, got [Errno 2] No such file or directory".
    with pytest.raises(UserError, match=r"got no report.json. Run .* out=absent$"):
        export_again(out, "report=absent")
    (out / "config.json").write_text("{}")
    with pytest.raises(UserError, match="got a report of another model"):
        export_again(out, f"report={report}")


def test_exporting_again_does_not_change_a_finished_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user may have edited the card or deleted the checkpoints."""
    out, _ = export(tmp_path)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    export_again(out)
    assert capsys.readouterr().out == f"export: {out} is finished: nothing to do\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
