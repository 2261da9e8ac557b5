"""Settings, shards, models and machines that are refused, each in one sentence."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conf import RankLocalError, UserError, settings
from conf.stage import read_manifest
from data_prep.shards import Shards
from data_prep.vocab import Vocab
from tests.train.test_attention import model
from train import checks
from train.checks import check_adaptive, check_devices, check_own, check_ranks
from train.config import LoraSettings, ObjectiveConfig, TrainConfig
from train.engine import check_settings
from train.lora import adapt
from train.plan import GIB, Memory, plan
from train.pretrained import model_config

GATED = ["lora.rank=8", "lora.gated=true"]
WIDE = ["objective=branch", "objective.wide_share=0.2"]
REFUSED = [
    (["optimizer.beta2=95"], "optimizer.beta2 must be from 0 to below 1, got 95"),
    (["dtype=float16"], "dtype must be auto, bfloat16 or float32, got float16"),
    (["+deepspeed.optimizer.type=Lion"], "deepspeed.optimizer must be left out"),
    (["+deepspeed.fp16.enabled=true"], "deepspeed.fp16 must be left out"),
    (["lora.gated=true", "objective=branch"], "lora.rank must be at least 1"),
    (["lora.dropout=1"], "lora.dropout must be from 0 to below 1"),
    ([*GATED, "objective=dual"], "need objective=branch, got objective=dual"),
    (["data.own=x", "objective=dual"], "need objective=branch, got objective=dual"),
    (["data.own=x", "objective=branch", "global_batch=1"], "sequences of both kinds"),
    (["data.own_share=1.0"], "data.own_share must be above 0 and below 1"),
    (["objective.wide_share=1.5"], "objective.wide_share must be 0 to 1"),
    (["objective.wide_share=0.2"], "needs objective=branch and diverse=false"),
    ([*WIDE, "objective.diverse=true"], "needs objective=branch and diverse=false"),
    ([*WIDE, "objective.L_max=5"], "objective.L_max must be above objective.L=5"),
    (["objective=basic", "objective.soft=0.5"], "need objective=dual or branch"),
    (["objective.soft=0.5", "objective.draft_loss=lk"], "must be 0 with draft_loss=lk"),
    (["global_batch=9"], "global_batch must be a multiple of micro_batch=1 x 8 ranks"),
    (["plan_device=b17"], "plan_device must be a100_40gb, .* got b17"),
    (["++model.shape.model_type=lama"], "model.shape must be valid for lama"),
    (["+model.shape.hiden_size=3"], "must have fields of llama, got hiden_size"),
    (["model.shape.hidden_size=30"], "not a multiple of the number of attention"),
    (["model.path=absent"], "model.path=absent must have a model's config.json"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_refused_settings(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan(settings("train", TrainConfig, ["plan=true", *overrides]))
    assert "\n" not in str(caught.value)


def test_random_weights_have_the_datas_vocabulary(data_folder: Path) -> None:
    vocab = Vocab.from_json(read_manifest(data_folder, "shards", "data.path")["vocab"])
    demo = settings("train", TrainConfig, ["model=demo"])
    result = model_config(demo.model, vocab=vocab)
    assert (result.vocab_size, result.eos_token_id) == (vocab.size, vocab.eos)
    with pytest.raises(UserError, match="must be a Transformers directory .* got null"):
        model_config(settings("train", TrainConfig, []).model, vocab=vocab)


def test_ranks_with_different_settings() -> None:
    check_ranks([{"steps": 4, "save_every": 2}] * 3)
    with pytest.raises(UserError, match="save_every must be the same on every rank"):
        check_ranks([{"steps": 4, "save_every": 2}, {"steps": 4, "save_every": 3}])


def test_own_text_must_have_the_ids_of_the_data(
    data_folder: Path, tmp_path: Path
) -> None:
    path = str(data_folder)
    data = read_manifest(data_folder, "shards", "data.path")
    check_own(path, path, data)
    with pytest.raises(UserError, match="must have seq_len=99 like data.path, got 128"):
        check_own(path, path, data | {"seq_len": 99})
    other = tmp_path / "own"
    shutil.copytree(data_folder, other)
    (other / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="must have tokenizer.json="):
        check_own(str(other), path, data)


def test_text_must_not_contain_adaptive_ids(data_folder: Path) -> None:
    vocab = Vocab.from_json(read_manifest(data_folder, "shards", "data.path")["vocab"])
    check_adaptive(str(data_folder), vocab, ObjectiveConfig())
    common = int(Shards(data_folder, "train")[0].tokens[5])
    used = replace(vocab, adaptive=(common,))
    with pytest.raises(UserError, match=f"got {common} in the text"):
        check_adaptive(str(data_folder), used, ObjectiveConfig())
    with pytest.raises(UserError, match=r"objective\.L must be at most the 1 diverse"):
        check_adaptive(str(data_folder), used, ObjectiveConfig(diverse=True))


def test_a_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4")
    check_devices()  # no GPU at all: ranks share the processor
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(RankLocalError, match="for each GPU, got 4"):
        check_devices()


@pytest.mark.parametrize(
    "preset", ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
)
def test_deepspeed_takes_our_own_settings(preset: str) -> None:
    arguments = ["plan=true", f"deepspeed={preset}"]
    check_settings(settings("train", TrainConfig, arguments).deepspeed)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("zero_optimization", {"stage": 4}, "stage"),
        ("zero_optimization", {"reduce_bucket_sise": 5}, "reduce_bucket_sise"),
        ("communication_data_type", "fp8", "communication_data_type"),
    ],
)
def test_deepspeed_refuses_other_settings(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(UserError, match=f"^deepspeed.{name} must be .*{message}"):
        check_settings({name: value})


def test_targets_of_lora_are_linear_layers() -> None:
    config = LoraSettings(rank=4, targets=["nothing"])
    with pytest.raises(UserError, match="must be linear layers"):
        adapt(model("sdpa").lm, config, adaptive=[3])


def test_training_refuses_too_small_a_machine(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = read_manifest(data_folder, "shards", "data.path")
    base = ["model=demo", f"data.path={data_folder}"]
    checks.check_start(settings("train", TrainConfig, base), data)
    monkeypatch.setattr(checks, "machine_memory", lambda: 0.01 * GIB)
    with pytest.raises(UserError, match=r"memory must suffice .* of this machine"):
        checks.check_start(settings("train", TrainConfig, base), data)
    checks.check_start(
        settings("train", TrainConfig, [*base, "memory_check=false"]), data
    )


@pytest.mark.parametrize("part", ["states", "loading", "host"])
def test_a_gpu_and_its_machine_need_memory(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "machine_memory", lambda: 8 * GIB)
    gpu = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    memory = Memory(states=GIB, activations=GIB, loss=GIB, host=0.0, loading=0.0)
    checks.check_memory(memory)
    with pytest.raises(UserError, match="memory must suffice"):
        checks.check_memory(replace(memory, **{part: 90 * GIB}))
