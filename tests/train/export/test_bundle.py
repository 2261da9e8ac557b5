"""The decoder's text as a folder: all that it needs and no more, as Transformers imports it."""

import json
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
    write_custom_generate,
)

INSTALLED = {"torch", "transformers", "numpy", "safetensors", *sys.stdlib_module_names}
ENTRY = (
    '"""Entry."""\nfrom infer.deep.leaf import (\n    leaf,\n    other as renamed,\n)\n'
)
LEAF = """from conf.errors import UserError  # why
def leaf():
    from infer.entry import late
"""
NGRAMS = {"table": None, "text": 2.0, "places": [0.4, 0.3]}


def test_modules_are_side_by_side_and_import_each_other_there(tmp_path: Path) -> None:
    """Imports over several lines, within a function, and in a circle."""
    sources = {
        "infer/entry.py": ENTRY,
        "infer/deep/leaf.py": LEAF,
        "conf/errors.py": "class UserError(Exception): pass\n",
        "infer/unneeded.py": "import peft\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = bundle("infer.entry", commit="0a1b", root=tmp_path)
    assert files.keys() == {"entry.py", "deep_leaf.py", "conf_errors.py"}
    head = MADE_FROM.format(path="infer/entry.py", commit="0a1b")
    assert files["entry.py"] == head + ENTRY.replace("infer.deep.", ".deep_")
    assert files["deep_leaf.py"].endswith(
        LEAF.replace("conf.errors", ".conf_errors").replace("infer.entry", ".entry")
    )


def test_every_file_is_needed_and_imports_only_what_is_installed(
    tmp_path: Path,
) -> None:
    """By Transformers' own reading of imports, which is of text, not of syntax."""
    adaptive = {"adaptive_ids": [7, 8, 9], "L": 3, "ngrams": NGRAMS, "gated": False}
    (tmp_path / "adaptive.json").write_text(json.dumps(adaptive))
    write_custom_generate(tmp_path)
    folder = tmp_path / "custom_generate"
    entry = folder / "generate.py"
    imported = {Path(file).name for file in get_relative_import_files(entry)}
    assert {*imported, "generate.py"} == {path.name for path in folder.glob("*.py")}
    for path in folder.glob("*.py"):
        compile(path.read_text(), str(path), "exec")
        assert set(get_imports(path)) <= INSTALLED, path.name
        assert path.read_text().startswith("# Made from ")
    assert f"adaptive_ids=(7, 8, 9), L=3, ngrams={NGRAMS}, gated=False" in (
        entry.read_text()
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(REQUIREMENTS) <= set(project["dependencies"])
    assert (folder / "requirements.txt").read_text().split() == list(REQUIREMENTS)


@pytest.mark.parametrize("adaptive", [None, {"adaptive_ids": [7], "L": 3}])
def test_only_for_models_that_transformers_loads_whole(
    tmp_path: Path, adaptive: dict[str, object] | None
) -> None:
    """None without adaptive tokens, nor with an adapter that would be left out."""
    (tmp_path / "adapter").mkdir()
    if adaptive:
        (tmp_path / "adaptive.json").write_text(json.dumps(adaptive))
    write_custom_generate(tmp_path)
    assert not (tmp_path / "custom_generate").exists()
