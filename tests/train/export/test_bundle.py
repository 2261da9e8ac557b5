"""Test that custom_generate/ contains exactly the files that the decoder imports."""

import sys
import tomllib
from pathlib import Path

from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from conf.runs.files import write_json
from conf.runs.stage import ROOT
from train.export.sidecars import REQUIREMENTS, write_custom_generate

INSTALLED = {
    *("torch", "transformers", "numpy"),
    *("huggingface_hub", "safetensors"),  # required by Transformers
    *sys.stdlib_module_names,
}
NGRAMS = {"table": None, "text": 2.0, "places": [0.4, 0.3]}


def test_every_file_is_needed_and_imports_only_installed_packages(
    tmp_path: Path,
) -> None:
    """Find imports with Transformers' functions, which search the text by regular expressions."""
    adaptive = {"adaptive_ids": [7, 8, 9], "L": 3, "ngrams": NGRAMS, "gated": False}
    write_json(tmp_path / "adaptive.json", adaptive)
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
