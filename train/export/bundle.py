"""custom_generate/ of a model directory: the project's own decoder, for use with Transformers alone.

Transformers copies the folder's Python files into a package of its cache and finds them by their relative
imports. So the decoder's entry and every module that it imports are written side by side, unchanged but for the
imports among them. They are read as text at every export; train does not import infer.

    infer/loop.py         from infer.trees.tree import Tree     loop.py          from .trees_tree import Tree
    infer/trees/tree.py                                         trees_tree.py
    conf/errors.py                                              conf_errors.py
                                                                generate.py      adaptive ids, n-grams' weights
"""

import re
from pathlib import Path

from conf.files import read_json, write_bytes
from conf.stage import ROOT, commit

ENTRY = "infer.portable.custom_generate"
# The only form of import that is rewritten.
OURS = re.compile(r"^( *)from ((?:infer|conf)\.[\w.]+) import\b", re.MULTILINE)
REQUIREMENTS = ("torch>=2.13,<3", "transformers>=5.23,<6")  # which need NumPy and safetensors

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


def write_custom_generate(out: Path) -> None:
    """Write custom_generate/ into a model directory.

    Not for a model without adaptive tokens (no adaptive.json), nor for one with an adapter that acts on every
    token, which Transformers would not load.
    """
    if not (out / "adaptive.json").is_file():
        return
    adaptive = read_json(out / "adaptive.json")
    gated = adaptive.get("gated", False)
    if (out / "adapter").is_dir() and not gated:
        return
    own_commit = commit()
    files = bundle(ENTRY, commit=own_commit)
    head = MADE_FROM.format(path="train/export/bundle.py", commit=own_commit)
    files["generate.py"] = head + GENERATE.format(
        entry=flat(ENTRY),
        ids=tuple(adaptive["adaptive_ids"]),
        L=adaptive["L"],
        ngrams=adaptive.get("ngrams"),
        gated=gated,
    )
    files["requirements.txt"] = "".join(f"{line}\n" for line in REQUIREMENTS)
    for name, text in files.items():
        write_bytes(out / "custom_generate" / name, text.encode())


def bundle(entry: str, *, commit: str, root: Path = ROOT) -> dict[str, str]:
    """Return file names and texts of a module and all of our modules that it imports, in one folder."""
    files, modules = dict[str, str](), [entry]
    for module in modules:  # grows
        name, path = f"{flat(module)}.py", f"{module.replace('.', '/')}.py"
        if name not in files:
            text = (root / path).read_text(encoding="utf-8")
            modules += [match[2] for match in OURS.finditer(text)]
            relative = OURS.sub(lambda match: f"{match[1]}from .{flat(match[2])} import", text)
            files[name] = MADE_FROM.format(path=path, commit=commit) + relative
    return files


def flat(module: str) -> str:
    """Return a module's name in the folder."""
    return module.removeprefix("infer.").replace(".", "_")
