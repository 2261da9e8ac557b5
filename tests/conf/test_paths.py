"""Settings that name files and folders, of every command."""

import os
from dataclasses import fields
from pathlib import Path

import pytest

from conf import settings
from conf.errors import visible
from conf.schema import fields_of
from docs.reference import ENTRIES
from infer.report.__main__ import ReportConfig
from tests.conf.conftest import refusal

DECONTAMINATE = {f"decontaminate.{name}" for name in ("humaneval", "mbpp", "multipl_e", "infilling", "others")}
PATHS = {
    "data_prep": {"out", "data.path", "tokenizer", "proportion.table", *DECONTAMINATE},
    "inspect": {"out"},
    "train": {"out", "data.path", "data.own", "model.path"},
    "export": {"out", "checkpoint", "data.path", "report", "chat_template"},
    "infer": {"model", "draft", "prompt_file", "html"},
    "graph": {"model", "draft", "out"},
    "playground": {"model", "draft"},
    "speed": {"model", "base", "draft", "out", "prompts.NAME.path"},
    "quality": {"model", "base", "out", "benchmarks.NAME.path", "sandbox.python"},
    "regenerate": {"model", "data.path", "out"},
    "report": {"out", "compare", "training"},
    "study": {"model", "draft", "out", "prompts.NAME.path"},
    "gpu_check": {"out"},
    "train_check": {"out"},
}


def test_every_path_is_marked_as_one() -> None:
    """A name over 255 bytes was a traceback in all commands, in some after the work."""
    marked = {
        entry: {
            name
            for name, owner, own, _ in fields_of(schema)
            if any(field.name == own and field.metadata.get("path") for field in fields(owner))
        }
        for entry, schema in ENTRIES.items()
    }
    assert marked == PATHS


@pytest.mark.parametrize(
    ("entry", "given", "name", "value"),
    [
        ("report", [], "out", "PATH"),
        ("report", ["out=o"], "compare", "other,PATH"),
        ("infer", ["model=m", "prompt=x"], "draft", "PATH"),
        ("speed", ["model=m", "out=o"], "prompts.mine.path", "PATH"),
        ("data_prep", ["out=o", "data.path=d", "tokenizer=t"], "decontaminate.others", "['PATH']"),
    ],
)
def test_a_path_that_the_system_refuses_is_one_sentence(
    entry: str, given: list[str], name: str, value: str, tmp_path: Path
) -> None:
    path = f"{tmp_path}/{'y' * 256}.png"
    assert refusal(entry, *given, f"{name}={value.replace('PATH', path)}") == (
        f"{name}={path} must be a path that the system can open, got 'File name too long'. Give another path."
    )


@pytest.mark.parametrize(
    ("reason", "below"),
    [
        ("Not a directory", "file/x"),
        ("Too many levels of symbolic links", "loop/x"),
        ("surrogates not allowed", "caf\udce9"),
        ("embedded null byte", "x\0y"),
        pytest.param(
            "Permission denied",
            "closed/x",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere"),
        ),
    ],
)
def test_whatever_the_reason(reason: str, below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "closed").mkdir(mode=0o000)
    message = refusal("report", f"out={tmp_path}/{below}")
    assert message.startswith(f"out={visible(f'{tmp_path}/{below}')} must be a path ") and reason in message


def test_a_path_that_is_not_there_is_left_to_the_command(tmp_path: Path) -> None:
    """It may be made, or be a name on the hub."""
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere.png")
    settings("report", ReportConfig, [f"out={tmp_path}/dangling.png"])
