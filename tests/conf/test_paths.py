"""Settings that name files and folders, of every command."""

import os
from pathlib import Path

import pytest

from conf import settings
from conf.errors import visible
from docs.reference import ENTRIES
from tests.conf.conftest import refusal

DRAFTED = ["model=m", "draft=self:1", "prompts.mine.path=p"]
DECONTAMINATE = [f"decontaminate.{name}" for name in ("humaneval", "mbpp", "multipl_e", "infilling", "others")]
# What each command needs, and its settings that are paths.
COMMANDS = {
    "data_prep": (
        ["out=o", "data.path=d", "vocab.train_size=400", "proportion.table=t", "budget=8B"],
        ["out", "data.path", "tokenizer", "proportion.table", *DECONTAMINATE],
    ),
    "inspect": (["out=o"], ["out"]),
    "train": (["out=o", "data.path=d", "objective=branch"], ["out", "data.path", "data.own", "model.path"]),
    "export": (["out=o", "checkpoint=c"], ["out", "checkpoint", "data.path", "report", "chat_template"]),
    "infer": (["model=m", "prompt=x"], ["model", "draft", "prompt_file", "html"]),
    "graph": (["model=m", "prompt=x", "draft=self:1"], ["model", "draft", "out"]),
    "playground": (["model=m"], ["model", "draft"]),
    "speed": (["out=o", *DRAFTED], ["model", "base", "draft", "out", "prompts.mine.path"]),
    "quality": (
        ["out=o", "model=m", "benchmarks.mine.path=b"],
        ["model", "base", "out", "benchmarks.mine.path", "sandbox.python"],
    ),
    "regenerate": (["out=o", "model=m", "data.path=d"], ["model", "data.path", "out"]),
    "report": (["out=o"], ["out", "compare", "training"]),
    "study": (["out=o", *DRAFTED], ["model", "draft", "out", "prompts.mine.path"]),
    "gpu_check": (["out=o"], ["out"]),
    "train_check": (["out=o"], ["out"]),
}


def overrides(entry: str, name: str, path: str) -> list[str]:
    """What a command needs, with `name` as this path."""
    needed = [text for text in COMMANDS[entry][0] if not text.startswith(f"{name}=")]
    if name == "prompt_file":
        needed.remove("prompt=x")
    if name == "tokenizer":
        needed.remove("vocab.train_size=400")
    value = {"decontaminate.others": f"['{path}']", "compare": f"other,{path}"}.get(name, path)
    return [*needed, f"{name}={value}"]


@pytest.mark.parametrize(
    ("entry", "name"), [(entry, name) for entry in COMMANDS for name in COMMANDS[entry][1]]
)
def test_every_path_that_the_system_refuses_is_one_sentence(entry: str, name: str, tmp_path: Path) -> None:
    """A name over 255 bytes was a traceback in all commands, in some after the work."""
    path = f"{tmp_path}/{'y' * 256}.png"
    assert refusal(entry, *overrides(entry, name, path)) == (
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


@pytest.mark.parametrize("entry", COMMANDS)
def test_a_path_that_is_not_there_is_left_to_the_command(entry: str, tmp_path: Path) -> None:
    """It may be made, or be a name on the hub."""
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere.png")
    settings(entry, ENTRIES[entry], overrides(entry, COMMANDS[entry][1][0], f"{tmp_path}/dangling.png"))


def test_the_commands_are_all_of_them() -> None:
    assert COMMANDS.keys() == ENTRIES.keys()
