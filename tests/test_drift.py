"""Documents obey the code: the messages that they quote are said, the names that they use are defined."""

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
    is_said,
    names,
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
# Spans that begin so are commands or code, or what other programs call their figures.
NO_MESSAGE = re.compile(
    r"(python|bash|hf|apt-get|wandb|torchrun|pip|uv|time|sbatch|transformers|vllm|sglang|trtllm-serve|tensorboard|from|"
    r"import|export|def|return|\.venv/\S+|Mean|Per-position|Avg) "
)
TRANSFORMERS = ("dynamic_module_utils.py", "generation/utils.py")  # it quotes these
NAME = re.compile(r"([A-Za-z_][\w.]*)(?:\(.*\))?")
DOTTED = re.compile(r"(?<![\w.])[a-z_]+\.([A-Z][a-z]\w+)\b")  # module.Class
# NAME=VALUE, but not Python's keyword arguments.
SETTING = re.compile(r"(?<![\w.'-])([a-z_]\w*(?:\.\w+)*)=(?!True|False)(?=[^=\s])")
DEEPSPEED = "deepspeed."  # its own settings have any name
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
    """Every string that the sources, the system or Transformers say, as tokens."""
    transformers = importlib.util.find_spec("transformers")
    assert transformers and transformers.origin
    library = [Path(transformers.origin).parent / file for file in TRANSFORMERS]
    texts = [os.strerror(code) for code in errno.errorcode]
    for path in [*SOURCES, *library]:
        texts += strings(path.read_text(encoding="utf-8"))
    for path in (ROOT / "launch").glob("*.sh"):
        texts += shell_strings(path.read_text(encoding="utf-8"))
    return [said for text in texts if len(said := tokens(text)) > 1]


@cache
def defined() -> set[str]:
    """Every name that a Python file of the project has."""
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
    return set().union(*map(names, files))


@cache
def modules() -> set[str]:
    """Every module and every name that is imported, under its own or another name."""
    result = {path.stem for path in SOURCES}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.alias):
                result |= {*node.name.split("."), node.asname or node.name}
    return result


@cache
def settings() -> set[str]:
    """Every setting and group of settings of a command, and the last part of its name."""
    result = {path.parent.name for path in YAML}
    for entry in ENTRIES:
        for group, schema in groups(entry.load()):
            fields = schema.__dataclass_fields__
            result |= {group, *fields, *(f"{group}.{field}" for field in fields)}
    return result


def quoted(page: Path) -> Iterator[str]:
    """Yield the messages between back-ticks."""
    text = INDENTED.sub("", without_blocks(page.read_text(encoding="utf-8")))
    for span in SPAN.findall(text):
        if not NO_MESSAGE.match(span):
            yield span


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_quoted_message_is_said(page: Path) -> None:
    stale = {
        f"{span!r}: {' '.join(run)!r} is said nowhere"
        for span in quoted(page)
        for run in runs(span)
        if not is_said(run, messages())
    }
    assert not stale, "\n".join(sorted(stale))


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_a_name_of_a_page_is_defined(page: str) -> None:
    text = INDENTED.sub("", without_blocks((ROOT / page).read_text(encoding="utf-8")))
    stale = [span for span in SPAN.findall(text) if not is_defined(span)]
    assert not stale


def test_the_names_of_docstrings_and_comments_are_defined() -> None:
    stale = []
    for path in SOURCES:
        text = "\n".join(prose(path.read_text(encoding="utf-8")))
        spans = re.findall(r"`([^`\n]+)`", text)
        stale += [f"{name(path)}: {span}" for span in spans if not is_defined(span)]
        # A class needs no back-ticks.
        stale += [
            f"{name(path)}: {match[0]}"
            for match in DOTTED.finditer(text)
            if match[1] not in defined() or match[0].split(".")[0] not in modules()
        ]
    assert not stale


def test_the_settings_of_yaml_comments_exist() -> None:
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
def test_a_setting_of_a_page_exists(page: Path) -> None:
    text = INDENTED.sub("", without_blocks(page.read_text(encoding="utf-8")))
    spans = [span for span in SPAN.findall(text) if re.fullmatch(r"[\w.]+=\S*", span)]
    assert not unknown_settings("\n".join(spans))


def is_defined(span: str) -> bool:
    """Return whether a span is a name, a dotted name or a file of the project, or no name at all."""
    match = NAME.fullmatch(span)
    if match is None or span in FOREIGN or (ROOT / span).exists():
        return True
    return (
        match[1] in defined()
        or set(match[1].split(".")) <= defined()
        or known(match[1])
    )


def known(setting: str) -> bool:
    """Return whether a name is that of a setting."""
    return setting in settings() or setting.rpartition(".")[2] in settings()


def unknown_settings(text: str) -> list[str]:
    """Return the names before `=` in a text that are no settings."""
    return [
        setting
        for setting in SETTING.findall(text)
        if not (known(setting) or setting in FOREIGN or setting.startswith(DEEPSPEED))
    ]
