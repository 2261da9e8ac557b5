"""A finished directory on the hub: what the hub's client is given, and its errors."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, constants
from huggingface_hub.errors import RepositoryNotFoundError

from conf import UserError, settings
from conf.stage import made_from, write_manifest
from tests.train.export.export_fixture import training
from train.export import ExportConfig
from train.export.__main__ import main
from train.export.card import render_card, write_card


class Hub:
    """In place of HfApi, for the user `someone` of the organization `Org`."""

    endpoint = "http://hub"

    def __init__(self) -> None:
        self.role = "write"
        self.repos = dict[str, bool]()  # whether private, by name
        self.files = dict[str, bytes]()
        self.commits = 0

    def whoami(self) -> dict[str, Any]:
        return {
            "name": "someone",
            "orgs": [{"name": "Org"}],
            "auth": {"accessToken": {"role": self.role}},
        }

    def model_info(self, repo: str) -> SimpleNamespace:
        if repo not in self.repos:
            raise RepositoryNotFoundError(
                "none", response=SimpleNamespace(headers={}, request=None)
            )  # type: ignore[arg-type]
        return SimpleNamespace(private=self.repos[repo])

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.repos.setdefault(repo, private)

    def list_repo_files(self, repo: str) -> list[str]:
        return list(self.files)

    def create_commit(
        self, repo: str, changes: list[Any], *, commit_message: str
    ) -> None:
        self.commits += 1
        for change in changes:
            if isinstance(change, CommitOperationAdd):
                self.files[change.path_in_repo] = Path(
                    change.path_or_fileobj
                ).read_bytes()  # type: ignore[arg-type]
            else:
                del self.files[change.path_in_repo]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("train.export.publish.HfApi", lambda: hub)
    return hub


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A finished export of tmp_path/tuned, with weights of zeros."""
    tuned, _ = training(tmp_path / "tuned")
    out = tmp_path / "model"
    out.mkdir()
    (out / "model.safetensors").write_bytes(bytes(1000))
    (out / "README.md").write_text("# Model, with a word of its author\n")
    origin = made_from(
        ExportConfig(str(tuned), str(out)),
        {"checkpoint": tuned},
        ignore=("report", "push", "private"),
    )
    write_manifest(out, "model", origin)
    return out


def export(out: Path, *overrides: str) -> None:
    main(
        settings(
            "export",
            ExportConfig,
            [f"checkpoint={out.with_name('tuned')}", f"out={out}", *overrides],
        )
    )


def test_a_finished_directory_is_pushed_whole(
    hub: Hub, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is exported again or changed: the card may have been edited, the checkpoints may be gone."""
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    export(exported, "push=org/model")
    assert capsys.readouterr().out.splitlines() == [
        "export: pushed to http://hub/org/model"
    ]
    assert hub.repos == {"org/model": True} and hub.commits == 1
    assert {name: hub.files[name] for name in before} == before
    export(exported, "push=org/model")  # over what is there
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HF_TOKEN": ""}, "got no token. Set HF_TOKEN, or use `hf auth login`"),
        ({"ENDPOINT": "http://127.0.0.1:9"}, "must be accepted by the hub, got Con"),
        (
            {"HF_HUB_OFFLINE": True},
            "must be accepted by the hub, got OfflineModeIsEnabled",
        ),
    ],
    ids=["no token", "no network", "offline"],
)
def test_errors_of_the_hubs_client_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, Any],
    message: str,
) -> None:
    """And precede the export itself, which would fail later here, without checkpoints."""
    training(tmp_path / "tuned")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", environment.pop("HF_TOKEN", "hf_good"))
    for name, value in ({"HF_HUB_OFFLINE": False} | environment).items():
        monkeypatch.setattr(constants, name, value)
    with pytest.raises(UserError) as error:
        export(tmp_path / "model", "push=someone/model")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("push=someone/model must")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("repo", "role", "message"),
    [
        ("else/model", "write", "must begin with one of someone, Org, got else"),
        ("someone/open", "write", "must be a private repository, got a public one"),
        ("someone/model", "read", "must have a token with write access"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_at_the_start(
    hub: Hub, tmp_path: Path, repo: str, role: str, message: str
) -> None:
    training(tmp_path / "tuned")
    hub.role, hub.repos = role, {"someone/open": False}
    with pytest.raises(UserError, match=message):
        export(tmp_path / "model", f"push={repo}")
    assert not (tmp_path / "model").exists() and hub.repos == {"someone/open": False}


def test_a_public_repository_is_pushed_to_with_private_false(
    hub: Hub, exported: Path
) -> None:
    hub.repos["someone/open"] = False
    export(exported, "push=someone/open", "private=false")
    assert "manifest.json" in hub.files


def test_an_upload_that_failed_is_repeated(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("HTTP error\n\nstorage quota exceeded\n")

    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="ValueError: storage quota exceeded"),
    ):
        patch.setattr(hub, "create_commit", fail)
        export(exported, "push=someone/model")
    export(exported, "push=someone/model")
    assert "manifest.json" in hub.files


def test_a_finished_directory_without_its_checkpoints_is_skipped(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused for its missing checkpoints."""
    export(exported)
    assert capsys.readouterr().out == f"export: {exported} is finished: nothing to do\n"


@pytest.mark.parametrize(
    ("gated", "same", "other"), [(False, "merged", "kept"), (True, "kept", "merged")]
)
def test_lora_may_name_its_default(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gated: bool,
    same: str,
    other: str,
) -> None:
    """A directory exported without the setting was refused with the same value given."""
    tuned, manifest = training(tmp_path / "tuned")
    manifest["settings"]["lora"] = {"rank": 4, "gated": gated}
    (tuned / "manifest.json").write_text(json.dumps(manifest))
    out = tmp_path / "model"
    write_manifest(
        out,
        "model",
        made_from(ExportConfig(str(tuned), str(out), lora=same), {"checkpoint": tuned}),
    )
    export(out)
    export(out, f"lora={same}")
    assert capsys.readouterr().out.count("nothing to do") == 2
    with pytest.raises(UserError, match=f"lora.*{other}"):
        export(out, f"lora={other}")


def test_nothing_of_an_older_export_stays_beside_a_newer(
    hub: Hub, exported: Path
) -> None:
    """The single file of an older push stayed beside the shards of a newer, and Transformers loaded it."""
    older = [
        "adapter/adapter_config.json",
        "custom_generate/generate.py",
        "adaptive.json",
    ]
    theirs = [
        "model-Q4.gguf",
        "assets/model.safetensors",
        "onnx/config.json",
        ".gitattributes",
    ]
    common = {"README.md", "manifest.json", *theirs}
    for name in older:
        path = exported / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    export(exported, "push=org/model")
    assert {"model.safetensors", *older} <= hub.files.keys()
    hub.files |= dict.fromkeys(theirs, b"")
    for name in ["model.safetensors", *older]:
        (exported / name).unlink()
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name in shards:
        (exported / name).write_bytes(name.encode())
    (exported / "model.safetensors.index.json").write_text("{}")
    export(exported, "push=org/model")
    assert hub.commits == 2
    assert hub.files.keys() == {*common, "model.safetensors.index.json", *shards}
    for name in [*shards, "model.safetensors.index.json"]:
        (exported / name).unlink()
    (exported / "model.safetensors").write_bytes(b"one")
    export(exported, "push=org/model")
    assert hub.files.keys() == {*common, "model.safetensors"}


def test_a_second_name_on_the_hub_goes_into_the_card(hub: Hub, exported: Path) -> None:
    """The commands kept the first name. An edited card keeps its author's words."""
    shutil.copytree(exported.with_name("tuned") / "model", exported, dirs_exist_ok=True)
    config = json.loads((exported / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (exported / "config.json").write_text(json.dumps(config))
    manifest = json.loads((exported.with_name("tuned") / "manifest.json").read_text())
    card = exported / "README.md"
    facts: dict[str, Any] = {"step": 9, "verified": None}
    named = [
        render_card(exported, manifest, **facts, push=name)
        for name in ("org/x", "org/y")
    ]
    write_card(exported, render_card(exported, manifest, step=9, verified=None))
    export(exported, "push=org/first")
    assert (
        "model=org/first prompt" in card.read_text() and "MODEL" not in card.read_text()
    )
    edited = [text.replace("## Limits", "Own words.\n\n## Limits") for text in named]
    write_card(exported, edited[0])
    export(exported, "push=org/y")
    assert card.read_text() == edited[1]
    assert hub.files["README.md"] == card.read_bytes()


def test_a_link_is_not_pushed(hub: Hub, exported: Path) -> None:
    """The target of a link was uploaded."""
    (exported.parent / "secret").write_text("x")
    (exported / "notes.txt").symlink_to(exported.parent / "secret")
    with pytest.raises(
        UserError, match="must be a directory without links, got .*notes.txt"
    ):
        export(exported, "push=someone/model")
