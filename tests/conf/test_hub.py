"""Names of the hub as settings, with a cache as the hub's client writes it."""

from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from conf import hub
from conf.errors import UserError
from conf.hub import Shipped, find_folder, replace_hub_names
from conf.runs.fingerprint import MANIFEST
from conf.settings.compose import settings
from infer.bench.config import BenchConfig
from infer.config import InferConfig
from train.config import TrainConfig
from train.pretrained import base_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the client is offline."""
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub")
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache: Path, name: str, *files: str) -> str:
    """Write a repository into the cache; return its folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).touch()
    return str(folder)


def test_a_name_in_the_cache_is_its_folder(cache: Path) -> None:
    name = "owner/model-7b.v1"
    model = put(cache, name, "config.json", "model.safetensors", "tokenizer.json")
    draft = put(cache, "owner/draft", "config.json", "model.safetensors")
    given = [f"model={name}", f"base={name}", "draft=owner/draft", "out=o/o"]
    bench = settings("bench", BenchConfig, given)
    replace_hub_names(bench)
    assert (bench.model, bench.base, bench.draft) == (model, model, draft)
    assert bench.out == "o/o"
    given = [f"model.path={name}", "data.path=a/b", "model.adapter=a"]
    given += ["lora.rank=4", f"model.mean_with=[{name},b/c]"]
    train = settings("train", TrainConfig, given)
    Path("b/c").mkdir(parents=True)
    replace_hub_names(train)
    assert (train.model.path, train.data.path) == (model, "a/b")
    assert train.model.mean_with == [model, "b/c"]
    assert base_model(model)["hub"] == name


def test_a_hub_that_cannot_be_reached_leaves_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached model needed the network, unless HF_HUB_OFFLINE was set."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    model = put(cache, "owner/model", "config.json", "model.safetensors")
    assert find_folder("owner/model") == model
    with pytest.raises(UserError, match="the hub did not answer"):
        find_folder("owner/other")


def test_a_name_that_is_not_cached_is_one_sentence_offline(cache: Path) -> None:
    train = settings("train", TrainConfig, ["model.path=owner/model"])
    with pytest.raises(UserError, match=r"^model.path=owner/model must be a folder or"):
        replace_hub_names(train)


def test_a_path_is_never_sent_to_the_hub(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    for path in ("../owner/model", "/owner", "runs/demo/model", "model", "runs/model/"):
        assert find_folder(path) == path


def test_pickled_weights_of_the_hub_are_refused(cache: Path) -> None:
    put(cache, "facebook/opt-125m", "config.json", "vocab.json", "merges.txt")
    with pytest.raises(UserError, match="must have safetensors weights on the"):
        find_folder("facebook/opt-125m")


@pytest.fixture
def assets(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for converted models; the folder of adapters is empty."""
    out = cache / "out"
    out.mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "cached_assets_path", lambda *names: out)
    monkeypatch.setattr(hub, "ADAPTERS", cache)
    return out


def add_adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adaptive.json").write_text("{}")


def test_a_shipped_adapter_is_converted_once(
    cache: Path, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Shipped("tiny-1m", package="no-such-package", version="1.2")
    monkeypatch.setitem(hub.SHIPPED, "tiny", absent)
    with pytest.raises(UserError, match="^model=tiny must have its adapter in"):
        find_folder("tiny")
    add_adapter(cache / "tiny-1m")
    with pytest.raises(UserError, match="pip install --no-deps no-such-package==1.2"):
        find_folder("tiny")
    monkeypatch.setitem(hub.SHIPPED, "tiny", replace(absent, package="pytest"))
    monkeypatch.setattr(
        "subprocess.call",
        lambda *args, **options: (assets / MANIFEST).touch(exist_ok=False),
    )
    assert find_folder("tiny") == find_folder("tiny") == assets
    Path("tiny").mkdir()
    assert find_folder("tiny") == "tiny"


def test_a_shipped_adapters_base_is_a_given_file_or_the_hubs(
    cache: Path, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "qwen2.5-coder-0.5b"
    shipped = hub.SHIPPED[name]
    monkeypatch.setitem(hub.SHIPPED, name, replace(shipped, adapter="none"))
    sentence = f"^model={name} must have its adapter in .* got no adaptive.json there"
    with pytest.raises(UserError, match=sentence):
        find_folder(name, gguf="model.gguf")
    monkeypatch.setitem(hub.SHIPPED, name, shipped)
    add_adapter(cache / shipped.adapter)
    with pytest.raises(UserError, match=f"file {shipped.file} of .*Or give gguf=FILE"):
        find_folder(name)
    with pytest.raises(UserError, match="gguf=absent.gguf must be the GGUF file of"):
        find_folder(name, gguf="absent.gguf")
    commands: list[list[str]] = []

    def convert(command: list[str], **options: object) -> int:
        commands.append(command)
        (assets / MANIFEST).touch()
        return 0

    monkeypatch.setattr("subprocess.call", convert)
    Path("own.gguf").touch()
    infer = settings("infer", InferConfig, [f"model={name}", "gguf=own.gguf"])
    replace_hub_names(infer)
    assert infer.model == str(assets)
    (assets / MANIFEST).unlink()
    repository = cache / f"models--{shipped.repository.replace('/', '--')}"
    put(cache, shipped.repository)
    stored = repository / "snapshots" / COMMIT / shipped.file
    stored.touch()
    assert find_folder(name) == assets
    given = [word for command in commands for word in command if "gguf=" in word]
    assert given == [f"gguf={cache.parent / 'own.gguf'}", f"gguf={stored}"]


def test_a_file_beside_a_model_that_has_its_weights_is_refused(cache: Path) -> None:
    infer = settings("infer", InferConfig, ["model=runs/model", "gguf=own.gguf"])
    with pytest.raises(UserError, match="^gguf must be left out with model=runs/model"):
        replace_hub_names(infer)
