"""Settings that name files and folders, of every command."""

import os
from pathlib import Path

import pytest

from conf import UserError, settings
from conf.errors import visible
from docs.reference import ENTRIES
from infer.report.__main__ import ReportConfig

DRAFTED = ["model=m", "draft=self:1", "prompts.mine.path=p"]
REQUIRED = {
    "data_prep": ["out=o", "data.path=d", "vocab.train_size=400", "proportion.table=t", "budget=8B"],
    "inspect": ["out=o"],
    "train": ["out=o", "data.path=d", "objective=branch"],
    "export": ["out=o", "checkpoint=c"],
    "infer": ["model=m", "prompt=x"],
    "graph": ["model=m", "prompt=x", "draft=self:1"],
    "playground": ["model=m"],
    "speed": ["out=o", *DRAFTED],
    "quality": ["out=o", "model=m", "benchmarks.mine.path=b"],
    "regenerate": ["out=o", "model=m", "data.path=d"],
    "report": ["out=o"],
    "study": ["out=o", *DRAFTED],
    "gpu_check": ["out=o"],
    "train_check": ["out=o"],
}
DECONTAMINATE = [f"decontaminate.{name}" for name in ("humaneval", "mbpp", "multipl_e", "infilling", "others")]
PATHS = {
    "data_prep": ["out", "data.path", "tokenizer", "proportion.table", *DECONTAMINATE],
    "inspect": ["out"],
    "train": ["out", "data.path", "data.own", "model.path"],
    "export": ["out", "checkpoint", "data.path", "report", "chat_template"],
    "infer": ["model", "draft", "prompt_file", "html"],
    "graph": ["model", "draft", "out"],
    "playground": ["model", "draft"],
    "speed": ["model", "base", "draft", "out", "prompts.mine.path"],
    "quality": ["model", "base", "out", "benchmarks.mine.path", "sandbox.python"],
    "regenerate": ["model", "data.path", "out"],
    "report": ["out", "compare", "training"],
    "study": ["model", "draft", "out", "prompts.mine.path"],
    "gpu_check": ["out"],
    "train_check": ["out"],
}


def overrides(entry: str, name: str, path: str) -> list[str]:
    """What a command needs, with `name` as this path."""
    needed = [text for text in REQUIRED[entry] if not text.startswith(f"{name}=")]
    if name == "prompt_file":
        needed.remove("prompt=x")
    if name == "tokenizer":
        needed.remove("vocab.train_size=400")
    value = {"decontaminate.others": f"['{path}']", "compare": f"other,{path}"}.get(name, path)
    return [*needed, f"{name}={value}"]


@pytest.mark.parametrize(("entry", "name"), [(entry, name) for entry in PATHS for name in PATHS[entry]])
def test_every_path_that_the_system_refuses_is_one_sentence(entry: str, name: str, tmp_path: Path) -> None:
    """A name over 255 bytes was a traceback in all commands, in some after the work."""
    path = f"{tmp_path}/{'y' * 256}.png"
    with pytest.raises(UserError) as told:
        settings(entry, ENTRIES[entry], overrides(entry, name, path))
    assert str(told.value) == (
        f"{name}={path} must be a path that the system can open, got 'File name too long'. Give another path."
    )


def test_whatever_the_reason(tmp_path: Path) -> None:
    """So were a path below a file, a loop of links, bytes that are no UTF-8, and a NUL byte."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    odd = {
        "Not a directory": f"{tmp_path}/file/x",
        "Too many levels of symbolic links": f"{tmp_path}/loop/x",
        "surrogates not allowed": f"{tmp_path}/caf\udce9",
        "embedded null byte": f"{tmp_path}/x\0y",
    }
    for reason, path in odd.items():
        with pytest.raises(UserError) as told:
            settings("report", ReportConfig, [f"out={path}"])
        assert str(told.value).startswith(f"out={visible(path)} must be a path ")
        assert reason in str(told.value)


@pytest.mark.parametrize("entry", PATHS)
def test_a_path_that_is_not_there_is_left_to_the_command(entry: str, tmp_path: Path) -> None:
    """It may be made, or be a name on the hub."""
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere.png")
    settings(entry, ENTRIES[entry], overrides(entry, PATHS[entry][0], f"{tmp_path}/dangling.png"))


def test_the_commands_are_all_of_them() -> None:
    assert PATHS.keys() == REQUIRED.keys() == ENTRIES.keys()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_a_folder_that_may_not_be_searched_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(UserError, match=r"^out=.* must be a path that the system can open, got 'Permission"):
        settings("report", ReportConfig, [f"out={tmp_path}/closed/x"])
