"""The decoder's text as a folder: all that it needs and no more, importable as Transformers imports it."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from train.export.bundle import (
    ENTRY,
    INSTALLED,
    MADE_FROM,
    OURS,
    REQUIREMENTS,
    bundle,
    flat,
    read_sources,
    write_custom_generate,
)

SOURCES = {
    "infer.entry": '"""Entry."""\nimport math\n'
    "from infer.deep.leaf import (\n    leaf,\n    other as renamed,\n)\n",
    "infer.deep.leaf": "import torch.nn as nn\nfrom conf.errors import UserError  # told\n\n\ndef leaf():\n"
    "    from infer.entry import late\n    return late\n",
    "conf.errors": "class UserError(Exception):\n    pass\n",
    "infer.unneeded": "import peft\n",
}
NGRAMS = {"table": None, "text": 2.0, "places": [0.4, 0.3]}


def test_modules_lie_side_by_side_and_import_each_other_there() -> None:
    """Imports over several lines, within a function, and in a circle."""
    head = "# Made from {} of adaptive-tokens by python -m train.export, commit 0a1b.\n"
    head += "# SPDX-License-Identifier: Apache-2.0\n"
    assert bundle(SOURCES, "infer.entry", commit="0a1b") == {
        "entry.py": head.format("infer/entry.py")
        + SOURCES["infer.entry"].replace("from infer.deep.leaf", "from .deep_leaf"),
        "deep_leaf.py": head.format("infer/deep/leaf.py")
        + SOURCES["infer.deep.leaf"]
        .replace("from conf.errors", "from .conf_errors")
        .replace("from infer.entry", "from .entry"),
        "conf_errors.py": head.format("conf/errors.py") + SOURCES["conf.errors"],
    }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import peft", "wanted ours, Transformers, PyTorch, NumPy or Python's own, found peft"),
        ("if True:\n    from hydra.core import x", "found hydra.core"),
        ("import infer.deep.leaf", "line 1: wanted ours imported by `from package.module import names`"),
        ("from infer import deep", "line 1: wanted ours imported by"),
        ("from infer.deep import leaf", "line 1: wanted ours imported by"),
        ("from .deep import leaf", "line 1: wanted ours imported by"),
        ("from train.loss import loss", "found train.loss"),
    ],
)
def test_what_cannot_go_along_is_named(line: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^infer.entry.*{re.escape(told)}"):
        bundle({**SOURCES, "infer.entry": line}, "infer.entry", commit="0a1b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    (out / "adaptive.json").write_text(json.dumps({"adaptive_ids": [7, 8, 9], "L": 3, "ngrams": NGRAMS}))
    write_custom_generate(out)
    return out / "custom_generate"


def test_the_library_finds_every_file_and_needs_no_more_than_itself(folder: Path) -> None:
    """By the library's own reading of imports, which is of text, not of syntax."""
    found = {Path(file).name for file in get_relative_import_files(folder / "generate.py")}
    assert {*found, "generate.py"} == {path.name for path in folder.glob("*.py")}
    for path in folder.glob("*.py"):
        compile(path.read_text(), str(path), "exec")
        assert set(get_imports(path)) <= INSTALLED - {"infer", "conf"}, path.name
    text = (folder / "generate.py").read_text()
    call = f"partial(generate_with, adaptive_ids=(7, 8, 9), L=3, ngrams={NGRAMS}, gated=False)"
    assert text.endswith(f"\ngenerate = {call}\n")


def test_two_modules_of_one_name_do_not_stand_for_each_other() -> None:
    sources = {
        "infer.a": "from infer.b.c import x\nfrom infer.b_c import y\n",
        "infer.b.c": "",
        "infer.b_c": "",
    }
    with pytest.raises(ValueError, match=r"infer\.b.c and infer\.b.c: wanted names that differ as files"):
        bundle(sources, "infer.a", commit="0a1b")


def test_it_is_the_projects_own_text(folder: Path) -> None:
    """No second implementation: but for what it says of itself, and of where it imports from, every file is
    the module it was made from.
    """
    sources = read_sources(*OURS)
    lines = MADE_FROM.count("\n")
    for path in folder.glob("*.py"):
        made = path.read_text().splitlines()
        assert "Apache-2.0" in made[lines - 1]
        if path.name == "generate.py":
            continue
        (module,) = (name for name in sources if f"{flat(name)}.py" == path.name)
        original = sources[module].splitlines()
        assert len(original) == len(made) - lines
        for ours, theirs in zip(original, made[lines:]):
            assert ours == theirs or re.match(r"\s*from (infer|conf)\.", ours)


def test_no_drafters_or_settings_beyond_what_it_decodes_with(folder: Path) -> None:
    """It stays small: what grows it is told here."""
    names = {path.stem for path in folder.glob("*.py")}
    assert len(names) <= 36
    assert not names & {"config", "api", "methods"}
    assert not [name for name in names if name.startswith(("drafters_draft", "measure_", "view_"))]
    assert [name for name in names if name.startswith("models_")] == ["models_gated"]


def test_requirements_are_the_projects(folder: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(REQUIREMENTS) <= set(project["dependencies"])
    assert (folder / "requirements.txt").read_text().split() == list(REQUIREMENTS)


def test_only_for_models_that_transformers_loads_whole(tmp_path: Path) -> None:
    """None without adaptive tokens; none with an adapter beside the weights, which would be left out."""
    write_custom_generate(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adaptive.json").write_text(json.dumps({"adaptive_ids": [7], "L": 3}))
    write_custom_generate(tmp_path)
    assert not (tmp_path / "custom_generate").exists()


def test_sources_are_read_without_importing_them() -> None:
    """train never imports infer: it reads text."""
    sources = read_sources(*OURS)
    assert {ENTRY, "infer.drafters.auto", "conf.errors"} <= set(sources)
    assert not any(name.endswith("__init__") for name in sources)
    tree = ast.parse(Path(write_custom_generate.__code__.co_filename).read_text())
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "infer" for node in ast.walk(tree))
