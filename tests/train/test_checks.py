import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conf import RankLocalError, UserError, settings
from conf.stage import read_manifest
from train.checks import check_devices, check_own, check_ranks
from train.config import TrainConfig
from train.engine import check_settings


def test_ranks_with_different_settings_are_refused() -> None:
    """One rank read a YAML before it was edited, the other after: they saved at different steps, and hung."""
    check_ranks([{"steps": 4, "save_every": 2}] * 3)
    with pytest.raises(
        UserError,
        match="save_every must be the same on every rank, got 2 on rank 0 and 3 on rank 1",
    ):
        check_ranks([{"steps": 4, "save_every": 2}, {"steps": 4, "save_every": 3}])


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "seq_len",
            99,
            r"must have seq_len=99 like data.path, got 128\. Prepare it .* seq_len=99",
        ),
        (
            "vocab",
            {"eos": 3},
            r"must have the vocabulary of data.path, got 1 for vocab.eos=3\. Prepare",
        ),
    ],
)
def test_own_text_must_have_the_ids_of_the_data(
    data_folder: Path, name: str, value: Any, sentence: str
) -> None:
    """A folder of own text with other ids would teach drafts of tokens that the text does not have."""
    data = read_manifest(data_folder, "shards", "data.path")
    check_own(str(data_folder), str(data_folder), data)
    other = data[name] | value if isinstance(value, dict) else value
    with pytest.raises(UserError, match=sentence):
        check_own(str(data_folder), str(data_folder), data | {name: other})


def test_own_text_must_have_the_tokenizer_of_the_data(
    data_folder: Path, tmp_path: Path
) -> None:
    data, other = read_manifest(data_folder, "shards", "data.path"), tmp_path / "own"
    shutil.copytree(data_folder, other)
    (other / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(
        UserError,
        match=r"tokenizer of data.path=.*got another tokenizer.json\. Prepare",
    ):
        check_own(str(other), str(data_folder), data)


def test_a_rank_without_a_gpu_is_reported_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processes on four GPUs, and the demo's two on one: a traceback of PyTorch's."""
    monkeypatch.setenv("LOCAL_RANK", "4")
    check_devices()  # no GPU at all: ranks share the processor
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(RankLocalError, match="for each GPU of a machine, got 4"):
        check_devices()
    monkeypatch.setenv("LOCAL_RANK", "3")
    check_devices()


@pytest.mark.parametrize(
    "preset", ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
)
def test_deepspeed_takes_our_own_settings(preset: str) -> None:
    check_settings(
        settings("train", TrainConfig, ["plan=true", f"deepspeed={preset}"]).deepspeed
    )


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "zero_optimization",
            {"stage": 2, "reduce_bucket_sise": 5},
            "must be .*: reduce_bucket_sise Extra inputs",
        ),
        (
            "zero_optimization",
            {"reduce_bucket_size": "50MB"},
            "must be .* reduce_bucket_size Input .*50MB",
        ),
        (
            "communication_data_type",
            "fp8",
            "must be what DeepSpeed takes, got fp8: Invalid communication_data",
        ),
        ("wall_clock_breakdown", "7x", "must be true or false, got 7x"),
        ("gradient_predivide_factor", "a", "must be a number, got a"),
        (
            "bf16",
            {"immediate_grad_update": "maybe"},
            "must be what DeepSpeed takes, got .*: immediate_grad",
        ),
        ("flops_profiler", {"enabled": "maybe"}, "must be what DeepSpeed takes, got "),
        ("sparse_attention", {}, "must be what DeepSpeed takes, got .*removed"),
    ],
)
def test_settings_beside_zero_are_checked_first(
    name: str, value: object, sentence: str
) -> None:
    """They were pydantic's tracebacks, after the model had been loaded."""
    with pytest.raises(UserError, match=f"^deepspeed.{name} {sentence}"):
        check_settings({"bf16": {"enabled": True}, name: value})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.beta2=95", "optimizer.beta2 must be from 0 to below 1, got 95"),
        (
            "deepspeed.zero_optimization.stage=4",
            "zero_optimization.stage must be 0, 1, 2 or 3, got 4",
        ),
        (
            "deepspeed.zero_optimization=3",
            "deepspeed.zero_optimization must be a group of settings, got 3",
        ),
        ("+deepspeed.optimizer.type=Lion", "deepspeed.optimizer must be left out, got"),
        (
            "+deepspeed.fp16.enabled=true",
            "deepspeed.fp16.enabled must be left out, got True",
        ),
        ("dtype=float16", "dtype must be auto, bfloat16 or float32, got float16"),
        (
            "tracker.project=a/b",
            "tracker.project must be a name .* without any of / .*, got a/b",
        ),
    ],
)
def test_settings_of_the_optimizer_that_cannot_be(override: str, message: str) -> None:
    """Tracebacks, and a plan that fitted; of DeepSpeed's optimizer AdamW was trained, without a word."""
    with pytest.raises(UserError, match=message):
        settings(
            "train", TrainConfig, ["experiment=sdsat_7b_l5", "plan=true", override]
        )
