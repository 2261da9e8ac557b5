"""The decoder's text as a folder: everything it needs and no more, importable as Transformers imports it."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from conf.stage import ROOT
from train.export.sidecars import (
    MADE_FROM,
    REQUIREMENTS,
    bundle,
    flat,
    write_custom_generate,
)

INSTALLED = {"torch", "transformers", "numpy", "safetensors", *sys.stdlib_module_names}
SOURCES = {
    "infer/entry.py": '"""Entry."""\nimport math\n'
    "from infer.deep.leaf import (\n    leaf,\n    other as renamed,\n)\n",
    "infer/deep/leaf.py": "import torch.nn as nn\nfrom conf.errors import UserError  # why\n\n\ndef leaf():\n"
    "    from infer.entry import late\n    return late\n",
    "conf/errors.py": "class UserError(Exception):\n    pass\n",
    "infer/unneeded.py": "import peft\n",
}
NGRAMS = {"table": None, "text": 2.0, "places": [0.4, 0.3]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    (out / "adaptive.json").write_text(
        json.dumps({"adaptive_ids": [7, 8, 9], "L": 3, "ngrams": NGRAMS})
    )
    write_custom_generate(out)
    return out / "custom_generate"


def test_modules_are_side_by_side_and_import_each_other_there(tmp_path: Path) -> None:
    """Imports over several lines, within a function, and in a circle."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    head = "# Made from {} of adaptive-tokens by python -m train.export, commit 0a1b.\n"
    head += "# SPDX-License-Identifier: Apache-2.0\n"
    entry, leaf, errors = (
        head.format(name) + SOURCES[name] for name in list(SOURCES)[:3]
    )
    assert bundle("infer.entry", commit="0a1b", root=tmp_path) == {
        "entry.py": entry.replace("from infer.deep.leaf", "from .deep_leaf"),
        "deep_leaf.py": leaf.replace("from conf.errors", "from .conf_errors").replace(
            "from infer.entry", "from .entry"
        ),
        "conf_errors.py": errors,
    }


def test_every_file_is_needed_and_imports_only_what_is_installed(folder: Path) -> None:
    """By Transformers' own reading of imports, which is of text, not of syntax."""
    imported = {
        Path(file).name for file in get_relative_import_files(folder / "generate.py")
    }
    assert {*imported, "generate.py"} == {path.name for path in folder.glob("*.py")}
    for path in folder.glob("*.py"):
        compile(path.read_text(), str(path), "exec")
        assert set(get_imports(path)) <= INSTALLED, path.name
    text = (folder / "generate.py").read_text()
    call = f"partial(generate_with, adaptive_ids=(7, 8, 9), L=3, ngrams={NGRAMS}, gated=False)"
    assert text.endswith(f"\ngenerate = {call}\n")


def test_files_are_the_projects_own_text(folder: Path) -> None:
    """No second implementation: but for the header and imports, every file is the module it was made from."""
    modules = {
        f"{flat('.'.join(path.relative_to(ROOT).with_suffix('').parts))}.py": path
        for package in ("infer", "conf")
        for path in (ROOT / package).rglob("*.py")
    }
    lines = MADE_FROM.count("\n")
    for path in folder.glob("*.py"):
        bundled = path.read_text().splitlines()
        assert "Apache-2.0" in bundled[lines - 1]
        if path.name == "generate.py":
            continue
        source = modules[path.name]
        assert (
            f"Made from {source.relative_to(ROOT)} of" in bundled[0]
        )  # no two modules have one name there
        original = source.read_text().splitlines()
        assert len(original) == len(bundled) - lines
        for ours, theirs in zip(original, bundled[lines:]):
            assert ours == theirs or re.match(r"\s*from (infer|conf)\.", ours)


def test_only_what_it_decodes_with_is_bundled(folder: Path) -> None:
    """It stays small: what makes it larger fails here."""
    names = {path.stem for path in folder.glob("*.py")}
    assert len(names) <= 36
    assert not names & {"config", "api", "methods"}
    assert not [
        name
        for name in names
        if name.startswith(("drafters_draft", "measure_", "view_"))
    ]
    assert [name for name in names if name.startswith("models_")] == ["models_gated"]


def test_requirements_are_the_projects(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(REQUIREMENTS) <= set(project["dependencies"])
    assert (folder / "requirements.txt").read_text().split() == list(REQUIREMENTS)


def test_only_for_models_that_transformers_loads_whole(tmp_path: Path) -> None:
    """None without adaptive tokens; none with an adapter beside the weights, which would be left out."""
    write_custom_generate(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adaptive.json").write_text(json.dumps({"adaptive_ids": [7], "L": 3}))
    write_custom_generate(tmp_path)
    assert not (tmp_path / "custom_generate").exists()
