"""The command line: Hydra's grammar, one-line messages for mistakes, errors of files, multirun."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.errors import RankLocalError, UserError
from conf.settings.compose import settings
from data_prep.config import DataPrepConfig
from infer.config import InferConfig
from tests.conf.conftest import command
from tests.messages import error
from train.config import TrainConfig

MODULES = (
    "data_prep",
    "data_prep.inspect",
    "train",
    "train.convert",
    "train.export",
    "train.inspect",
    "infer",
    "infer.bench",
    "infer.bench.compare",
    "infer.regenerate",
)
DATA = {
    "vocab.bos='<x>'": ("vocab.bos", "<x>"),
    "vocab.eos=<y>": ("vocab.eos", "<y>"),
    "data.include=[a,b]": ("data.include", ["a", "b"]),
    "benchmarks=[humaneval,all]": (
        "decontaminate.mbpp",
        "google-research-datasets/mbpp",
    ),
    "experiment=mine": ("fim_rate", 0.25),
    "data.path=a (b)/c=d": ("data.path", "a (b)/c=d"),
    "out='runs/${seed}'": ("out", "runs/0"),
}
TRAIN = {
    "+deepspeed.mine={depth: 3}": ("deepspeed.mine.depth", 3),
    "+model.shape.model_type=llama": ("model.shape.model_type", "llama"),
    "~deepspeed.data_types": ("deepspeed.data_types", None),
    "objective=branch": ("objective.name", "branch"),
    "++steps=7": ("steps", 7),
    "model.path=null": ("model.path", None),
}
INFER = {
    "prompt=def f(a, b):": ("prompt", "def f(a, b):"),
    "infill.prefix='3'": ("infill.prefix", "3"),
    "infill.suffix=Hello, wörld": ("infill.suffix", "Hello, wörld"),
    "decode.stop=['a b',\"it's\"]": ("decode.stop", ["a b", "it's"]),
    "draft=self:3": ("draft", "self:3"),
    "prompt_file= 1e3 ": ("prompt_file", " 1e3 "),  # it became 1000.0
}


@pytest.mark.parametrize(
    ("module", "idioms"), [("data_prep", DATA), ("train", TRAIN), ("infer", INFER)]
)
def test_idioms_of_hydra(
    module: str, idioms: dict[str, tuple[str, Any]], tmp_path: Path
) -> None:
    choice = tmp_path / "choices" / "experiment" / "mine.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text("# @package _global_\nfim_rate: 0.25\n")
    flags = ["--config-dir", str(tmp_path / "choices"), "--cfg", "job", "--resolve"]
    end = command("-m", module, *flags, *idioms, cwd=tmp_path)
    config = OmegaConf.create(yaml.safe_load(end.stdout))
    for word, (name, value) in idioms.items():
        assert OmegaConf.select(config, name) == value, word
    assert [path.name for path in tmp_path.iterdir()] == ["choices"]


def test_help_without_groups_has_no_heading_for_them(tmp_path: Path) -> None:
    """Bug: the heading was followed by nothing."""
    for module, groups in (("infer.bench.compare", False), ("infer", True)):
        text = command("-m", module, "--help", cwd=tmp_path).stdout
        assert ("Groups of settings" in text) == groups and "NAME=VALUE" in text


def test_help_of_every_entry_needs_no_torch(tmp_path: Path) -> None:
    code = f"""
import runpy, sys
for name in {MODULES}:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0
print(*{{"torch", "transformers", "wandb", "datasets"}} & sys.modules.keys())
"""
    end = command("-c", code, cwd=tmp_path)
    *printed, slow = end.stdout.splitlines()
    for name in MODULES:
        assert any(f" -m {name} " in line for line in printed), name
    assert (end.returncode, slow) == (0, ""), end.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense=1"], "unknown setting 'nonsense': --help lists the settings"),
        (["experimen=demo"], "unknown setting 'experimen': did you mean 'experiment'?"),
        (["+objective.ww=1"], "setting 'objective.ww': did you mean 'objective.w'?"),
        (["deepspeed.x=1"], "'deepspeed.x' is new: write +deepspeed.x=VALUE to add it"),
        (["steps=ten"], "steps must be a whole number, got ten"),
        (["lora.targets=q"], "must be a list, got q. Write lora.targets=["),
        (["steps=3,4"], "steps must be one value, got 3,4. Write steps=[3,4] for"),
        (["steps=[1"], "must be NAME=VALUE in Hydra's grammar, got steps=[1: "),
        (["~steps"], "setting 'steps' is required: give it as steps=VALUE"),
        (["objective=basics"], "objective must be basic, branch, causal or dual, got"),
        (
            ["out=x/${no}"],
            "out must refer to an existing setting by ${NAME}, got ${no}",
        ),
        (["optimizer.beta1=1"], "optimizer.beta1 must be from 0 to below 1, got 1.0"),
        (["--config-dir=/absent"], "Additional config directory '/absent' not found"),
        (["tracker.mode=a\nb\x1b[m"], r"disabled or tensorboard, got a b\x1b[m"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_code_2(
    words: list[str], message: str, failed: Callable
) -> None:
    code, printed = failed(*words, entry="train", schema=TrainConfig)
    assert code == 2 and message in error(printed)


@given(st.text(min_size=1, max_size=20), st.text("\\'\"${}(,", max_size=8))
@hypothesis_settings(max_examples=50, deadline=None)
def test_text_that_is_no_value_of_the_grammar_stays_as_it_is(a: str, b: str) -> None:
    prompt = f"{a}({b}"
    config = settings("infer", InferConfig, [f"model={b}(", f"prompt={prompt}"])
    assert (config.prompt, config.model) == (prompt, f"{b}(")


PRINT = """
from conf.errors import UserError
from conf.settings.cli import run
from data_prep.inspect import InspectConfig

def main(config):
    print(config.inspect.seed, config.out)
    if config.inspect.seed == 5:
        raise UserError("seed must not be 5")

run("inspect", InspectConfig, main)
"""


def test_multirun_runs_every_combination_and_leaves_no_files(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ["-c", PRINT, "-m", "inspect.seed=3,4,5,6", "out='r/${inspect.seed} (x)'"]
    end = command(*words, cwd=tmp_path, TMPDIR=str(temporary))
    printed = ["3 r/3 (x)", "4 r/4 (x)", "5 r/5 (x)"]
    assert (end.returncode, end.stdout.splitlines()) == (2, printed)
    assert end.stderr == "error: seed must not be 5\n"
    assert list(tmp_path.rglob("*")) == [temporary]
    end = command(*words, cwd=tmp_path, WORLD_SIZE="2")
    assert "-m must run in one process, got torchrun" in error(end.stderr)


def test_an_unknown_member_of_a_list_of_choices_is_named() -> None:
    """Regression: benchmarks=[nix] printed Hydra's own message, without the choices."""
    sentence = "benchmarks must be all or humaneval, got nix$"
    with pytest.raises(UserError, match=sentence):
        settings("data_prep", DataPrepConfig, ["benchmarks=[nix]", "out=o"])


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("x must be y", page="a.md#b"), 2, "x must be y\n  see docs/a.md#b"),
        (OSError(errno.ENOSPC, "no space", "f"), 2, "f: disk full (no space)"),
        (OSError(errno.ENOSPC, "no space"), 2, "out: disk full (no space)"),
        (OSError(errno.EROFS, "read-only", "f"), 2, "f: read-only"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes_and_messages(
    raised: BaseException, code: int, message: str, failed: Callable
) -> None:
    def fail(config: InferConfig) -> None:
        raise raised

    line = f"error: {message}\n" if message else ""
    assert failed("model=m", main=fail) == (code, line)


def test_an_unexpected_error_is_a_traceback_and_code_1(failed: Callable) -> None:
    code, printed = failed("model=m", main=lambda config: 1 / 0)
    assert code == 1 and printed.startswith("Traceback")


def test_one_rank_reports_an_error_of_all_ranks(
    failed: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conf.settings.cli.GRACE", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert failed("nonsense=1") == (2, "")

    def fail(config: InferConfig) -> None:
        raise RankLocalError("this rank alone")

    assert failed("model=m", main=fail) == (2, "error: this rank alone\n")
