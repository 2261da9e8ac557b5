"""Pushing with the hub's own client to a server on this machine that answers as the hub does."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from conf import UserError, settings
from conf.stage import made_from, write_manifest
from tests.train.export.export_fixture import training
from tests.train.export.hub import Hub
from train.export.__main__ import main
from train.export.card import render_card, write_card
from train.export.config import ExportConfig


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of it, for a user who is signed in."""
    Hub.role, Hub.repos, Hub.files, Hub.commits, Hub.refused = "write", {}, {}, 0, ("", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    own = {"ENDPOINT": address, "HF_TOKEN_PATH": str(tmp_path / "token"), "HF_HUB_OFFLINE": False}
    for name, value in {**own, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    yield address
    server.shutdown()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A finished export of tmp_path/tuned, whose weights are no matter here."""
    tuned, _ = training(tmp_path / "tuned")
    out = tmp_path / "model"
    out.mkdir()
    (out / "model.safetensors").write_bytes(bytes(1000))
    (out / "README.md").write_text("# Model, with a word of its author\n")
    made = made_from(
        ExportConfig(str(tuned), str(out)), {"checkpoint": tuned}, ignore=("report", "push", "private")
    )
    write_manifest(out, "model", made)
    return out


def export(out: Path, *given: str) -> None:
    main(settings("export", ExportConfig, [f"checkpoint={out.with_name('tuned')}", f"out={out}", *given]))


def test_a_finished_directory_is_pushed_whole(
    hub: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is exported again, and no file changed: the card may have been edited by hand.

    Its checkpoints may be gone: they were asked for, and read whole, before anything else.
    """
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    export(exported, "push=org/model")
    assert capsys.readouterr().out.splitlines() == [f"export: pushed to {hub}/org/model"]
    assert Hub.repos == {"org/model": True} and Hub.commits == 1
    assert {name: Hub.files[name] for name in before} == before
    export(exported, "push=org/model")  # over what is there
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before


@pytest.mark.parametrize(
    ("repo", "change", "told"),
    [
        ("someone/model", {"HF_TOKEN": ""}, "found no token: set HF_TOKEN, or use `hf auth login`"),
        ("someone/model", {"HF_TOKEN": "hf_bad"}, "wanted a token that may write there, found its answer 401"),
        ("else/model", {}, "wanted one of someone, Org before the /, found else"),
        ("someone/a--b", {}, "wanted a name that the hub allows, found Cannot have --"),
        ("someone/open", {}, "wanted a private repository, found a public one"),
        (
            "someone/model",
            {"ENDPOINT": "http://127.0.0.1:9"},
            "wanted an answer of http://127.0.0.1:9, found Con",
        ),
        ("someone/model", {"HF_HUB_OFFLINE": True}, "wanted the hub, found HF_HUB_OFFLINE=1"),
    ],
    ids=["no token", "wrong token", "not theirs", "bad name", "public", "no network", "offline"],
)
def test_what_the_hub_would_refuse_is_told_before_anything_is_written(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: str, change: dict[str, Any], told: str
) -> None:
    """Here the export itself, of a folder without checkpoints, would fail after it."""
    training(tmp_path / "tuned")
    Hub.repos["someone/open"] = False
    for name, value in change.items():
        if name == "HF_TOKEN":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.setattr(constants, name, value)
    with pytest.raises(UserError) as found:
        export(tmp_path / "model", f"push={repo}")
    assert told in str(found.value) and "\n" not in str(found.value)
    assert str(found.value).startswith(f"push={repo}: wanted")
    assert not (tmp_path / "model").exists() and Hub.repos == {"someone/open": False}


def test_a_public_repository_is_pushed_to_where_that_is_asked_for(hub: str, exported: Path) -> None:
    Hub.repos["someone/open"] = False
    export(exported, "push=someone/open", "private=false")
    assert "manifest.json" in Hub.files


def test_a_token_that_only_reads_and_an_upload_that_fails(hub: str, exported: Path) -> None:
    Hub.role = "read"
    with pytest.raises(UserError, match="wanted a token of the hub that may write, found one that only reads"):
        export(exported, "push=someone/model")
    Hub.role, Hub.refused = "write", ("/commit/", 413)
    with pytest.raises(UserError, match="found its answer 413: storage quota exceeded"):
        export(exported, "push=someone/model")
    Hub.refused = ("", 0)
    export(exported, "push=someone/model")
    assert "manifest.json" in Hub.files


def test_a_finished_directory_without_its_checkpoints_is_skipped(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused: "wanted a folder with checkpoints, found none"."""
    export(exported)
    assert capsys.readouterr().out == f"export: {exported} is finished: nothing to do\n"


@pytest.mark.parametrize(("gated", "same", "other"), [(False, "merged", "kept"), (True, "kept", "merged")])
def test_lora_by_default_is_what_it_stands_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gated: bool, same: str, other: str
) -> None:
    """A directory exported without the setting was refused as another result with the very same value given."""
    tuned, manifest = training(tmp_path / "tuned")
    manifest["settings"]["lora"] = {"rank": 4, "gated": gated}
    (tuned / "manifest.json").write_text(json.dumps(manifest))
    out = tmp_path / "model"
    write_manifest(
        out, "model", made_from(ExportConfig(str(tuned), str(out), lora=same), {"checkpoint": tuned})
    )
    export(out)
    export(out, f"lora={same}")
    assert capsys.readouterr().out.count("nothing to do") == 2
    with pytest.raises(UserError, match=f"lora={other}"):
        export(out, f"lora={other}")


def test_nothing_of_an_older_export_stays_beside_a_newer(hub: str, exported: Path) -> None:
    """The single file of an older push stayed beside the shards of a newer, and Transformers loaded it."""
    older = ["adapter/adapter_config.json", "custom_generate/generate.py", "adaptive.json"]
    theirs = ["model-Q4.gguf", "assets/model.safetensors", "onnx/config.json", ".gitattributes"]
    for name in older:
        path = exported / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    export(exported, "push=org/model")
    assert {"model.safetensors", *older} <= Hub.files.keys()
    Hub.files |= dict.fromkeys(theirs, b"")
    for name in ["model.safetensors", *older]:
        (exported / name).unlink()
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name in shards:
        (exported / name).write_bytes(name.encode())
    (exported / "model.safetensors.index.json").write_text("{}")
    export(exported, "push=org/model")
    assert Hub.commits == 2
    found = {name for name in Hub.files if not re.fullmatch("[0-9a-f]{64}", name)}
    assert found == {"README.md", "manifest.json", "model.safetensors.index.json", *shards, *theirs}
    for name in [*shards, "model.safetensors.index.json"]:
        (exported / name).unlink()
    (exported / "model.safetensors").write_bytes(b"one")
    export(exported, "push=org/model")
    found = {name for name in Hub.files if not re.fullmatch("[0-9a-f]{64}", name)}
    assert found == {"README.md", "manifest.json", "model.safetensors", *theirs}


def test_a_second_name_on_the_hub_goes_into_the_card(hub: str, exported: Path) -> None:
    """The card of a directory pushed first to one name and then to another had the commands of the first."""
    shutil.copytree(exported.with_name("tuned") / "model", exported, dirs_exist_ok=True)
    config = json.loads((exported / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (exported / "config.json").write_text(json.dumps(config))
    manifest = json.loads((exported.with_name("tuned") / "manifest.json").read_text())
    card = exported / "README.md"
    write_card(exported, render_card(exported, manifest, step=9, verified=None))
    export(exported, "push=org/first")
    assert "# first\n" in card.read_text() and "infer model=org/first prompt" in card.read_text()
    export(exported, "push=org/second")
    assert "# second\n" in card.read_text() and "first" not in card.read_text()
    assert Hub.files["README.md"] == card.read_bytes()

    edited = card.read_text().replace("## Limits", "A word of its author.\n\n## Limits")
    card.write_text(edited)
    export(exported, "push=org/second")
    assert card.read_text() == edited and Hub.files["README.md"] == edited.encode()
    with pytest.raises(
        UserError, match="push=org/third: wanted a card of that name, found org/second in .*edited"
    ):
        export(exported, "push=org/third")
    assert card.read_text() == edited and "org/third" not in Hub.repos
    card.write_text(edited.replace("org/second", "MODEL"))  # which stands for any name
    export(exported, "push=org/third")
    assert Hub.files["README.md"] == card.read_bytes() == edited.replace("org/second", "MODEL").encode()


def test_a_link_is_not_pushed(hub: str, exported: Path) -> None:
    """What a link leads to was uploaded, of a directory that anybody may have made."""
    (exported.parent / "secret").write_text("x")
    (exported / "notes.txt").symlink_to(exported.parent / "secret")
    with pytest.raises(UserError, match="must be a directory without links, got .*notes.txt"):
        export(exported, "push=someone/model")
