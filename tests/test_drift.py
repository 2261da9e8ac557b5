"""Test that the messages and names in documents exist in the sources."""

import ast
import errno
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from conf.settings.compose import FOLDER
from docs.settings import ENTRIES, groups
from tests.markdown import INDENTED, SPAN
from tests.markdown import prose as without_blocks
from tests.sources import (
    names,
    occurs,
    prose,
    runs,
    shell_strings,
    strings,
    tokens,
)
from tests.test_docs import PAGES, ROOT, name

PACKAGES = ("conf", "data_prep", "train", "infer")
SOURCES = [
    path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
]
YAML = sorted(FOLDER.rglob("*.yaml"))
# A span that starts with one of these words is a command, code, or a figure of another program.
NO_MESSAGE = re.compile(
    r"(python|bash|hf|apt-get|wandb|torchrun|pip|uv|time|sbatch|transformers|vllm|tensorboard|from|import|export|"
    r"def|return|\.venv/\S+|Mean|Per-position|Avg) "
)
# Files of Transformers with messages that the documents quote.
TRANSFORMERS = ("dynamic_module_utils.py", "generation/utils.py")
NAME = re.compile(r"([A-Za-z_][\w.]*)(?:\(.*\))?")
DOTTED = re.compile(r"(?<![\w.])[a-z_]+\.([A-Z][a-z]\w+)\b")  # module.Class
# NAME=VALUE, but not Python's keyword arguments.
SETTING = re.compile(r"(?<![\w.'-])([a-z_]\w*(?:\.\w+)*)=(?!True|False)(?=[^=\s])")
LIBRARIES = ("deepspeed.", "hydra.")  # settings of these libraries may have any name
# Names of other projects, and a column with a number in place of N.
FOREIGN = {
    "llm_engine.py",
    "zero_to_fp32",
    "save_torch_state_dict",
    "safetensors.numpy",
    "cp",
    "encode_cyclic",
    "llama_vocab",
    "matchness",
    "acceptance_at_pos_N",
    "logits_scaling",
}


@cache
def messages() -> list[list[str]]:
    """Return all strings of the sources, the system and Transformers, as tokens."""
    transformers = importlib.util.find_spec("transformers")
    assert transformers and transformers.origin
    library = [Path(transformers.origin).parent / file for file in TRANSFORMERS]
    texts = [os.strerror(code) for code in errno.errorcode]
    for path in [*SOURCES, *library]:
        texts += strings(path.read_text(encoding="utf-8"))
    for path in (ROOT / "launch").glob("*.sh"):
        texts += shell_strings(path.read_text(encoding="utf-8"))
    return [words for text in texts if len(words := tokens(text)) > 1]


@cache
def defined() -> set[str]:
    """Return all names in the Python files of the project."""
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
    return set().union(*map(names, files))


@cache
def modules() -> set[str]:
    """Return all modules and all imported names, with their aliases."""
    result = {path.stem for path in SOURCES}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.alias):
                result |= {*node.name.split("."), node.asname or node.name}
    return result


@cache
def settings() -> set[str]:
    """Return all settings and groups of settings, by full name and by the last part of it."""
    result = {path.parent.name for path in YAML}
    for entry in ENTRIES:
        for group, schema in groups(entry.load()):
            fields = schema.__dataclass_fields__
            result |= {group, *fields, *(f"{group}.{field}" for field in fields)}
    return result


def quoted(page: Path) -> Iterator[str]:
    """Yield the code spans of a page that may be messages."""
    text = INDENTED.sub("", without_blocks(page.read_text(encoding="utf-8")))
    for span in SPAN.findall(text):
        if not NO_MESSAGE.match(span):
            yield span


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_quoted_messages_exist_in_the_sources(page: Path) -> None:
    stale = {
        f"{span!r}: {' '.join(run)!r} is in no string of the sources"
        for span in quoted(page)
        for run in runs(span)
        if not occurs(run, messages())
    }
    assert not stale, "\n".join(sorted(stale))


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_names_in_a_page_are_defined(page: str) -> None:
    text = INDENTED.sub("", without_blocks((ROOT / page).read_text(encoding="utf-8")))
    stale = [span for span in SPAN.findall(text) if not is_defined(span)]
    assert not stale


def test_names_in_docstrings_and_comments_are_defined() -> None:
    stale = []
    for path in SOURCES:
        text = "\n".join(prose(path.read_text(encoding="utf-8")))
        spans = re.findall(r"`([^`\n]+)`", text)
        stale += [f"{name(path)}: {span}" for span in spans if not is_defined(span)]
        # module.Class is checked without back-ticks too.
        stale += [
            f"{name(path)}: {match[0]}"
            for match in DOTTED.finditer(text)
            if match[1] not in defined() or match[0].split(".")[0] not in modules()
        ]
    assert not stale


def test_settings_in_yaml_comments_exist() -> None:
    stale = []
    for path in YAML:
        lines = path.read_text(encoding="utf-8").splitlines()
        text = "\n".join(line.partition("#")[2] for line in lines)
        spans = [
            span
            for span in re.findall(r"`([^`]+)`", text)
            if NAME.fullmatch(span) and not is_defined(span)
        ]
        stale += [f"{name(path)}: {word}" for word in spans + unknown_settings(text)]
    assert not stale


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_settings_in_a_page_exist(page: Path) -> None:
    text = INDENTED.sub("", without_blocks(page.read_text(encoding="utf-8")))
    spans = [span for span in SPAN.findall(text) if re.fullmatch(r"[\w.]+=\S*", span)]
    assert not unknown_settings("\n".join(spans))


def is_defined(span: str) -> bool:
    """Return whether a span is a defined name or a file of the project, or is not a name."""
    match = NAME.fullmatch(span)
    if match is None or span in FOREIGN or (ROOT / span).exists():
        return True
    return (
        match[1] in defined()
        or set(match[1].split(".")) <= defined()
        or known(match[1])
    )


def known(setting: str) -> bool:
    """Return whether a name is a setting, or the last part of one."""
    return setting in settings() or setting.rpartition(".")[2] in settings()


def unknown_settings(text: str) -> list[str]:
    """Return the names before `=` in a text that are not settings."""
    return [
        setting
        for setting in SETTING.findall(text)
        if not (known(setting) or setting in FOREIGN or setting.startswith(LIBRARIES))
    ]
