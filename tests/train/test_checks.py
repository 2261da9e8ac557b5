"""Test that unusable settings, shards, models and machines are refused with one sentence."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.errors import RankLocalError, UserError
from conf.runs.files import write_json
from conf.settings.compose import settings
from data_prep.shards import Shards
from tests.conftest import vocab_of
from train import checks
from train.__main__ import main
from train.checks import (
    check_adaptive,
    check_devices,
    check_own_text,
    check_ranks,
    check_start,
)
from train.config import ObjectiveConfig, TrainConfig
from train.engine import check_deepspeed_settings
from train.inputs import RunInputs, read_inputs
from train.spec import GIB, Memory, read_spec

GATED = ["lora.rank=8", "lora.gated=true"]
REFUSED = [
    (["optimizer.lr=5e-6"], "min_lr must be at most optimizer.lr=5e-06, got 1e-05"),
    (["optimizer.beta2=95"], "optimizer.beta2 must be from 0 to below 1, got 95"),
    (["+deepspeed.optimizer.type=Lion"], "deepspeed.optimizer must be left out"),
    (["lora.gated=true", "objective=branch"], "lora.rank must be at least 1"),
    (["lora.dropout=1"], "lora.dropout must be from 0 to below 1"),
    # Bug: without lora.rank it trained all weights.
    (["lora.targets=[q_proj]"], "at least 1 with lora.targets=.'q_proj'., got 0"),
    # Bug: it trained random weights, not the model in model.path.
    (["model=tiny", "model.path=DIR"], "random weights .*, got DIR. Omit one of them"),
    ([*GATED, "objective=dual"], "need objective=branch, got objective=dual"),
    (["data.own=x", "objective=dual"], "need objective=branch, got objective=dual"),
    (["data.own=x", "objective=branch", "global_batch=1"], "sequences of both kinds"),
    (["data.own_share=1.0"], "data.own_share must be above 0 and below 1"),
    (["optimizer.name=muon", "deepspeed=zero1"], "needs deepspeed=zero0.* got stage 1"),
    (["objective.previous_token=true"], "previous_token needs lora.gated=true"),
    (["objective=basic", "objective.soft=0.5"], "needs objective=dual or branch"),
    (["global_batch=9"], "global_batch must be a multiple of micro_batch=1 x 8 ranks"),
    (["plan_device=b17"], "plan_device must be a100_40gb, .* got b17"),
    (["objective.L=1025"], "objective.L must be 1 to 1,?024, got 1025"),
    (["lora.dropout=0.1"], "lora.rank must be at least 1 with lora.dropout=0.1, got 0"),
    # Bug: without LoRA it had no effect.
    (["optimizer.rows_rate=2"], "rows_rate=2 needs lora.rank of at least 1, got 0"),
    (["lora.targets=[null]"], "lora.targets must have no null in its list"),
    (["optimizer.lr=null"], "optimizer.lr must have a value, got null"),
    (
        ["model=tiny", "model.shape.max_position_embeddings=0"],
        "model must have a context of at least 1 token, got max_position_embeddings=0",
    ),
    (["plan_device=nan"], "plan_device must be a100_40gb, .* got nan"),
    (["++model.shape.model_type=lama"], "model.shape must be valid for lama"),
    (["+model.shape.hiden_size=3"], "must have fields of llama, got hiden_size"),
    (["model.shape.hidden_size=30"], "not a multiple of the number of attention"),
    (
        [*GATED, "objective=branch", "model=tiny", "++model.shape.model_type=nemotron"],
        "lora.gated=true needs a model that passes extra arguments.* got nemotron",
    ),
    (["lora.rank=4", "lora.targets=[wq]"], "got wq, which it does not have"),
    (["+deepspeed.compile.deepcompile=true"], "compile must be left out"),
    (["+deepspeed.communication_data_type=fp8"], "must be valid for DeepSpeed"),
    (["+model.shape.rope_parameters={rope_type:dynamic,factor:2.0}"], "on the length"),
    (  # the run started, although no window of this length fits a sequence
        ["objective=branch", "objective.L=128", "data.path={data}"],
        "objective.L must be below the 128 tokens of a sequence .*, got 128. Lower obj",
    ),
    (["model.path=absent"], "model.path=absent must have a model's config.json"),
    # Bug: a ZeroDivisionError and a KeyError of Transformers.
    (["model.shape.num_attention_heads=0"], "valid for llama, got .* by zero. Correct"),
    (["+model.shape.rope_parameters={rope_type:linear}"], "valid for llama, .*factor"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_refused_settings(
    overrides: list[str], message: str, data_folder: Path
) -> None:
    given = [override.replace("{data}", str(data_folder)) for override in overrides]
    with pytest.raises(UserError, match=message) as caught:
        main(settings("train", TrainConfig, ["plan=true", *given]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        # Bug: without data.path an AttributeError for max_position_embeddings, with it for
        # vocab_size, before the architecture was checked.
        (
            {"model_type": "bloom"},
            "must be a causal model .* got bloom, .* another model",
        ),
        ({"model_type": "llama4"}, "must be a causal model .* got llama4, which takes"),
        # Bug: a ZeroDivisionError and an AttributeError of Transformers.
        ({"num_attention_heads": 0}, "must have a model's config.json, got .* by zero"),
        ({"dtype": "abc"}, "must have a model's config.json, got .* 'abc'. Download"),
    ],
)
@pytest.mark.parametrize("with_data", [False, True])
def test_an_unusable_config_json(
    fields: dict[str, object],
    message: str,
    with_data: bool,
    data_folder: Path,
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama"} | fields)
    data = [f"data.path={data_folder}"] if with_data else []
    given = ["plan=true", f"model.path={tmp_path}", *data]
    with pytest.raises(UserError, match=message):
        main(settings("train", TrainConfig, given))


def test_ranks_with_different_settings() -> None:
    with pytest.raises(UserError, match="save_every must be the same on every rank"):
        check_ranks([{"steps": 4, "save_every": 2}, {"steps": 4, "save_every": 3}])


def test_own_text_must_have_the_datas_tokenizer(
    data_folder: Path, tmp_path: Path
) -> None:
    common = ["model=tiny", f"data.path={data_folder}", "objective=branch"]

    def inputs(own: Path) -> RunInputs:
        return read_inputs(settings("train", TrainConfig, [*common, f"data.own={own}"]))

    check_own_text(inputs(data_folder))
    other = tmp_path / "own"
    shutil.copytree(data_folder, other)
    (other / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="must have tokenizer.json="):
        check_own_text(inputs(other))


def test_data_without_held_out_sequences(data_folder: Path) -> None:
    """Bug: such data was refused after the model had loaded, with useless advice."""
    config = settings("train", TrainConfig, ["model=tiny", f"data.path={data_folder}"])
    inputs = read_inputs(config)
    inputs.data["held_out"]["sequences"] = 0
    with pytest.raises(UserError, match="must have held-out sequences"):
        check_start(config, inputs, read_spec(config, inputs))


@pytest.mark.parametrize(
    "overrides",
    [["lora.rank=4", "lora.targets=[wq]"], ["+deepspeed.communication_data_type=fp8"]],
)
def test_a_run_is_checked_like_its_plan(
    data_folder: Path, tmp_path: Path, overrides: list[str]
) -> None:
    """Bug: with memory_check=false these errors came after the weights had loaded."""
    out = tmp_path / "out"
    arguments = ["model=tiny", f"data.path={data_folder}", "memory_check=false"]
    arguments.append(f"out={out}")
    config = settings("train", TrainConfig, [*arguments, *overrides])
    with pytest.raises(UserError, match="lora.targets=wq|must be valid for DeepSpeed"):
        main(config)


def test_text_must_not_contain_adaptive_ids(data_folder: Path) -> None:
    vocab = vocab_of(data_folder)
    common = int(Shards(data_folder, "train")[0].tokens[5])
    used = replace(vocab, adaptive=(common,))
    with pytest.raises(UserError, match=f"got {common} in the text of sequence"):
        check_adaptive(str(data_folder), used, ObjectiveConfig())
    with pytest.raises(UserError, match=r"objective\.L must be at most the 1 diverse"):
        check_adaptive(str(data_folder), used, ObjectiveConfig(diverse=True))


def test_a_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(RankLocalError, match="for each GPU, got 4"):
        check_devices()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero_optimization", {"reduce_bucket_sise": 5}),
        ("communication_data_type", "fp8"),
    ],
)
def test_a_value_that_deepspeed_refuses(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^deepspeed.{name} must be valid"):
        check_deepspeed_settings({name: value})


@pytest.mark.parametrize("part", ["states", "loading", "host"])
@pytest.mark.parametrize(
    ("gpu", "machine", "message"),
    [
        ((80, 80), (8, 8), "Choose a smaller model or batch"),
        ((20, 80), (4, 120), "End other programs or choose a smaller model or batch"),
    ],
)
def test_a_gpu_and_its_machine_need_free_memory(
    gpu: tuple[int, int],
    machine: tuple[int, int],
    message: str,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: the check used the total memory, so a run started while other programs used it.

    The run was then killed.
    """
    scaled = [tuple(GIB * size for size in sizes) for sizes in (gpu, machine)]
    monkeypatch.setattr(checks, "machine_memory", lambda swap: scaled[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: scaled[0])
    memory = Memory(states=GIB, activations=GIB, loss=GIB, host=0.0, loading=0.0)
    checks.check_memory(memory)
    needed = gpu[0] if part == "states" else machine[0] + 0.5
    with pytest.raises(UserError, match=f"memory must suffice .*{message}") as caught:
        checks.check_memory(replace(memory, **{part: needed * GIB}))
    (free, total), holder = (gpu, "GPU") if part == "states" else (machine, "machine")
    reserved = part == "states"  # 1 GiB of the GPU is reserved
    free = min(free, total - reserved)
    sentence = (
        f"got {free:.1f} GiB free of the {total - reserved:.1f} GiB of this {holder}"
    )
    assert sentence in str(caught.value)
