"""custom_generate/ of a model directory: the project's own decoder, for those who have Transformers alone.

The library copies the folder's Python files into a package of its cache and finds them by their relative
imports. So the decoder's entry and every module that it needs are written side by side, their text as it
stands but for the imports among them:

    infer/loop.py         from infer.trees.tree import Tree     loop.py          from .trees_tree import Tree
    infer/trees/tree.py                                         trees_tree.py
    conf/errors.py                                              conf_errors.py
                                                                generate.py      adaptive ids, n-grams' weights

Nothing of `infer` is imported here: it is read as text. A bundle is made at every export, so none can be stale.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from conf.files import write_bytes
from conf.stage import commit

OURS = ("infer", "conf")
ENTRY = "infer.portable.custom_generate"
REQUIREMENTS = ("torch>=2.13,<3", "transformers>=5.23,<6")  # which need NumPy and safetensors
INSTALLED = {"torch", "transformers", "numpy", "safetensors", *sys.stdlib_module_names}

MADE_FROM = """\
# Made from {path} of adaptive-tokens by python -m train.export, commit {commit}.
# SPDX-License-Identifier: Apache-2.0
"""
GENERATE = '''\
"""Decode with this model's adaptive tokens: faster, and token for token the same.

    model.generate(**inputs, max_new_tokens=256, custom_generate=DIR, trust_remote_code=True)

DIR is the model's directory or its name on the hub. Arguments and limits: `generate` in {entry}.py.
"""

from functools import partial

from .{entry} import generate as generate_with

generate = partial(generate_with, adaptive_ids={ids}, L={L}, ngrams={ngrams}, gated={gated})
'''


class Import(NamedTuple):
    """A line `from module import ...` or `import module`; `level` counts the dots of a relative one."""

    module: str
    line: int  # from 1 on
    level: int
    names: bool  # it is a `from ... import`


def write_custom_generate(out: Path) -> None:
    """Beside the weights of a model directory; nothing for a model that the decoder needs more for: one
    without adaptive tokens (a missing adaptive.json), or with an adapter that acts on every token, which
    Transformers would not load.
    """
    described = out / "adaptive.json"
    if not described.is_file():
        return
    adaptive = json.loads(described.read_text(encoding="utf-8"))
    gated = adaptive.get("gated", False)
    if (out / "adapter").is_dir() and not gated:
        return
    made = commit()
    files = bundle(read_sources(*OURS), ENTRY, commit=made)
    head = MADE_FROM.format(path="train/export/bundle.py", commit=made)
    ids = tuple(adaptive["adaptive_ids"])
    ngrams = adaptive.get("ngrams")
    files["generate.py"] = head + GENERATE.format(
        entry=flat(ENTRY), ids=ids, L=adaptive["L"], ngrams=ngrams, gated=gated
    )
    files["requirements.txt"] = "".join(f"{line}\n" for line in REQUIREMENTS)
    for name, text in files.items():
        write_bytes(out / "custom_generate" / name, text.encode())


def bundle(sources: Mapping[str, str], entry: str, *, commit: str) -> dict[str, str]:
    """File names and texts of a module and all that it imports of ours, in one folder. Pure.

    `sources` are texts by module. Raises ValueError, naming the module, for an import of what is neither ours
    nor installed with Transformers, and for one in a form that is not rewritten.
    """
    files, made, waiting = dict[str, str](), dict[str, str](), [entry]
    while waiting:
        module = waiting.pop()
        name, text = f"{flat(module)}.py", sources[module]
        if made.setdefault(name, module) != module:
            raise ValueError(
                f"{made[name]} and {module}: wanted names that differ as files, found {name} twice"
            )
        if name in files:
            continue
        needed = [found for found in imports(text) if _is_ours(module, found, sources)]
        head = MADE_FROM.format(path=f"{module.replace('.', '/')}.py", commit=commit)
        files[name] = head + _relative(text, needed)
        waiting += [found.module for found in needed]
    return files


def flat(module: str) -> str:
    """The module's name in the folder."""
    return module.removeprefix("infer.").replace(".", "_")


def imports(text: str) -> Iterator[Import]:
    """Every import of a module's text, wherever it stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield Import(node.module or "", node.lineno, node.level, True)
        elif isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, 0, False) for alias in node.names)


def _is_ours(module: str, found: Import, sources: Mapping[str, str]) -> bool:
    """Whether what a module imports goes into the folder with it."""
    top = found.module.split(".")[0]
    if top not in OURS and not found.level:
        if top not in INSTALLED:
            raise ValueError(
                f"{module}: wanted ours, Transformers, PyTorch, NumPy or Python's own, found {found.module}"
            )
        return False
    if found.level or not found.names or found.module not in sources:
        raise ValueError(
            f"{module}, line {found.line}: wanted ours imported by `from package.module import names`"
        )
    return True


def _relative(text: str, needed: list[Import]) -> str:
    """The text with these imports from the same folder."""
    lines = text.splitlines(keepends=True)
    for found in needed:
        line = lines[found.line - 1]
        lines[found.line - 1] = line.replace(f"from {found.module} ", f"from .{flat(found.module)} ", 1)
    return "".join(lines)


def read_sources(*packages: str) -> dict[str, str]:
    """The texts of these installed packages' modules, by name; packages themselves, whose __init__.py would
    bring more than a module, are left out. Nothing of them is executed.
    """
    found = {}
    for package in packages:
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        for path in root.rglob("*.py"):
            if path.name != "__init__.py":
                name = ".".join([package, *path.relative_to(root).with_suffix("").parts])
                found[name] = path.read_text(encoding="utf-8")
    return found
