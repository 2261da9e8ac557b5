"""A fingerprint depends only on the content."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conf.runs.fingerprint import BLOCK, fingerprint, fingerprint_files
from conf.runs.stage import write_manifest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "adapter").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("card")
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)
    save_file({"embed": rows, "head": rows}, folder / "model.safetensors")
    save_file({"a": rows}, folder / "adapter" / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    "name", ["model.safetensors", "adapter/adapter_model.safetensors"]
)
def test_other_weights_are_another_model(model: Path, name: str) -> None:
    """A model was known by its path or its manifest alone: with other weights, of the
    same size and time, the old result was called finished.
    """
    write_manifest(model, "model", {})
    before, old = fingerprint(model), os.stat(model / name)
    weights = load_file(model / name)
    next(iter(weights.values()))[3] = 0  # as a training of adaptive tokens changes it
    save_file(weights, model / name)
    os.utime(model / name, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert os.stat(model / name).st_size == old.st_size
    assert fingerprint(model) != before


def test_a_copy_and_links_are_the_same_model(model: Path, tmp_path: Path) -> None:
    """So is a model with another card or manifest. The hub's cache consists of links."""
    shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    (tmp_path / "copy" / "README.md").write_text("another card")
    write_manifest(tmp_path / "copy", "model", {})
    (tmp_path / "linked").mkdir()
    for path in model.iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    for other in ("copy", "linked"):
        assert fingerprint(tmp_path / other) == fingerprint(model)


def test_files_count_by_name_and_every_block(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(2 * BLOCK + 1))
    whole = fingerprint_files([("a", path)])
    assert whole == fingerprint_files([("a", path)]) != fingerprint_files([("b", path)])
    with open(path, "r+b") as file:
        file.seek(2 * BLOCK)
        file.write(b"x")
    assert fingerprint_files([("a", path)]) != whole
    (tmp_path / "empty").write_bytes(b"")
    assert fingerprint_files([("empty", tmp_path / "empty")]) != fingerprint_files([])
