import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import conf
from conf import settings
from infer.config import DraftConfig, InferConfig
from tests.conf.conftest import refusal
from train.config import TrainConfig

CONF = Path(conf.__file__).parent


def drafting(*overrides: str) -> DraftConfig:
    return settings("infer", InferConfig, ["model=m", "prompt=x", *overrides]).draft


def demo(*overrides: str) -> TrainConfig:
    return settings("train", TrainConfig, ["experiment=demo", "out=o", *overrides])


@given(st.text(min_size=1, max_size=40))
@hypothesis_settings(max_examples=30)
def test_a_prompt_reaches_the_code_unchanged(prompt: str) -> None:
    """Hydra's grammar read `prompt=def fib(n):` as a function call, and `${x}` as an interpolation."""
    config = settings(
        "infer", InferConfig, ["model=a folder/ü (1), 'x'", f"prompt={prompt}"]
    )
    assert (config.prompt, config.model.path) == (prompt, "a folder/ü (1), 'x'")


@pytest.mark.parametrize(
    "path", ["runs/draft", "a folder/ü (1), 'x'", "[${x}]={y: 3}\\", "true"]
)
def test_a_bare_value_is_that_of_the_field_marked_for_it(path: str) -> None:
    """`draft=DIR` beside `draft.adaptive=true`, whatever the directory is called."""
    assert (
        drafting(f"draft={path}")
        == drafting(f"draft.model={path}")
        == DraftConfig(path)
    )
    config = DraftConfig(path, adaptive=True, dtype="float32")
    assert (
        drafting("draft.dtype=float32", f"draft={path}", "draft.adaptive=true")
        == config
    )


def test_no_bare_value_is_none_at_all() -> None:
    assert drafting() == drafting("draft=null") == DraftConfig()
    assert drafting("draft=self:3").layers == 3


def test_a_library_s_own_settings_may_be_given_added_and_left_out() -> None:
    """Given at once it was an unknown setting 'model.shape', and did one mean 'model.shape'?"""
    shape = demo("model.shape={model_type:llama,hidden_size:64}").model.shape
    assert shape == {**demo().model.shape, "model_type": "llama", "hidden_size": 64}
    added = demo("+deepspeed.mine.depth=3").deepspeed
    assert added["mine"] == {"depth": 3} and "zero_optimization" in added
    assert "zero_optimization" not in demo("~deepspeed.zero_optimization").deepspeed


def test_a_sign_before_what_there_is_changes_nothing() -> None:
    assert demo("+steps=3", "++out=a b, [c]") == demo("steps=3", "out=a b, [c]")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["draft=d", "draft.adaptiv=true"],
            "unknown setting 'draft.adaptiv': did you mean 'draft.adaptive'?",
        ),
        (["draft="], "draft must be a model directory or self:N, got nothing"),
        (
            ["draft.adaptive=true"],
            "draft must be a model with draft.adaptive or draft.dtype, got none",
        ),
        (["draft=self:0"], "draft must be self:N with N layers from 1 on, got self:0"),
    ],
)
def test_a_mistaken_draft_is_named_in_one_sentence(
    overrides: list[str], message: str
) -> None:
    assert message in refusal("infer", "model=m", "prompt=x", *overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # Hydra's signs: `+verify_sequence=1` was added and ignored, `~dtype` took the setting away.
        (
            "+objective.ww=1",
            "unknown setting 'objective.ww': did you mean 'objective.w'?",
        ),
        (
            "+objective=basics",
            "objective must be one of basic, branch, causal, dual, got basics",
        ),
        (
            "hydra.verbose=true",
            "unknown setting 'hydra.verbose': --help lists the settings",
        ),
        ("~steps", "steps must have a value, got ~steps. Write steps=VALUE"),
        (
            "~objective",
            "objective must have a value, got ~objective. Write objective=VALUE",
        ),
        # These were OmegaConf's words, with its types, and NumPy's error of the first step.
        ("steps=ten", "steps must be a whole number, got 'ten'"),
        (
            "out=x/${nothing}",
            "out must refer to settings as ${NAME}, got ${nothing}, which is none",
        ),
        ("seed=-1", "seed must be at least 0, got -1"),
        (
            "experiment=nothing",
            "experiment must be one of deepseek_coder_1b_l5, demo, ",
        ),
        (
            "objective=",
            "objective must be one of basic, branch, causal, dual, got none",
        ),
        (
            "objective=null",
            "objective must be one of basic, branch, causal, dual, got null",
        ),
        ("steps=[1", "steps must be a value such as 3, true, [1,2] or a word, got [1"),
        (
            "tracker.mode=loud",
            "tracker.mode must be offline, online or disabled, got loud",
        ),
        # All of these were accepted, but for a traceback of OverflowError and Hydra's lines on sweeps.
        ("optimizer.lr=nan", "optimizer.lr must be a finite number, got nan"),
        (
            "deepspeed.mine={x:[-inf]}",
            "deepspeed.mine.x must be a finite number, got -inf",
        ),
        ("steps=1" + 30 * "0", "steps must be a number of up to 63 bits, got 1000"),
        (
            "optimizer.clip=1" + 400 * "0",
            "setting 'optimizer.clip': int too large to convert to float",
        ),
        ("model.compile=8", "model.compile must be true or false, got 8"),
        (
            "lora.targets=[{a:1}]",
            "lora.targets must be a list of single values, got {'a': 1} in it",
        ),
        ("steps=null", "steps must have a value, got null"),
        ("steps=3,4", "steps must be one value, got 3,4"),
        # A value's line end split the sentence, and its escape codes reached the terminal.
        ("objective.name=a\nb\x1b[31m\udcff", r"got a\nb\x1b[31m\udcff"),
    ],
)
def test_a_wrong_setting_is_named_in_one_sentence(override: str, message: str) -> None:
    assert message in refusal("train", "experiment=demo", override)


@pytest.mark.parametrize(
    "name", ["objective@x", "steps.x", "steps@x", "out.", "x" * 300]
)
def test_what_is_no_name_of_a_setting_is_reported_so(name: str) -> None:
    """`objective@x=3` was a ValueError of Hydra's, and a long name an OSError: it looked for a file of it."""
    assert refusal("train", "experiment=demo", f"{name}=3").startswith(
        f"unknown setting '{name}': "
    )


def test_a_missing_setting_is_named_whole() -> None:
    """Without data.path it asked for 'path', which it then refused."""
    assert (
        refusal("data_prep", "out=d")
        == "setting 'data.path' is required: give it as data.path=VALUE"
    )
    assert (
        refusal("data_prep", "out=d", "path=code")
        == "unknown setting 'path': did you mean 'data.path'?"
    )


def test_no_choice_of_a_group_that_has_none_anyway() -> None:
    """`decode=null` was a traceback of Hydra's: "Config group override must be a string or a list"."""
    given = ["model=m", "prompt=x"]
    assert settings("infer", InferConfig, [*given, "decode=null"]) == settings(
        "infer", InferConfig, given
    )


@pytest.mark.parametrize(
    "entry",
    ["data_prep", "data_prep.inspect", "train", "train.export", "infer", "infer.bench"],
)
def test_a_mistake_is_one_line_the_page_on_it_and_exit_code_2(entry: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", entry, "nonsense=1"], capture_output=True, text=True
    )
    assert ended.returncode == 2
    page = f"docs/settings/{entry.split('.')[-1]}.md"
    assert (
        ended.stderr
        == f"error: unknown setting 'nonsense': --help lists the settings\n  see {page}\n"
    )


@pytest.mark.parametrize(
    "path", sorted((CONF / "train" / "experiment").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_recipe_composes(path: Path) -> None:
    assert settings("train", TrainConfig, [f"experiment={path.stem}"]).steps > 0


def test_out_takes_the_values_of_other_settings() -> None:
    """`out='runs/${objective.L}'` made a folder of that name; a prompt keeps its braces."""
    assert (
        demo("objective.L=7", "out=runs/${objective.L} a, [b]").out == "runs/7 a, [b]"
    )
    assert demo("out=it's\\${objective.L}").out == "it's${objective.L}"
