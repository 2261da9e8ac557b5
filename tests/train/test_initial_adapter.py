"""Test the start from an export's adapter and head, or from the mean of several."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from conf.adapter import WEIGHTS
from conf.architecture import skeleton
from conf.errors import UserError
from conf.runs.files import read_json, write_json
from conf.settings.compose import settings
from tests.train.test_lora import (
    ADAPTIVE,
    adapted,
    base_model,
    branch_layout,
    hidden_and_tally,
    train,
)
from train.config import LoraSettings, ModelConfig, TrainConfig
from train.head import PreviousTokenHead, write_head
from train.initial_adapter import (
    SavedAdapter,
    begin_head,
    begin_with,
    read_saved_adapters,
    start_from,
)
from train.lora import PlainWeights, adapt, adapter_weights
from train.model import AdaptiveLM
from train.spec import read_spec

RANK_4 = LoraSettings(rank=4, alpha=6, gated=True)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[AdaptiveLM, Path]:
    """Return a module with a trained adapter of rank 4, and the folder of its export."""
    module = adapted(RANK_4)
    train(module)
    plain = skeleton(module.lm.config)
    weights = PlainWeights(
        plain,
        RANK_4,
        module.lm.state_dict(),
        adaptive=ADAPTIVE,
        merged=False,
        dtype=torch.float32,
    )
    weights.save_adapter(tmp_path / "adapter")
    return module, tmp_path


def saved_in(folder: Path) -> SavedAdapter:
    return read_saved_adapters([folder])[0]


def test_training_continues_an_adapter_at_a_larger_rank(
    trained: tuple[AdaptiveLM, Path],
) -> None:
    """At first it computes the same as before; then the new rows and columns learn."""
    before, folder = trained
    path = ModelConfig(adapter=str(folder)).adapter_folders[0]
    assert [path] == ModelConfig(adapter=str(folder / "adapter")).adapter_folders
    assert path == folder / "adapter"
    module = adapted(LoraSettings(rank=6, alpha=12, gated=True))
    begin_with(module.lm, saved_in(path))
    layout = branch_layout(seed=5)
    expected, _ = hidden_and_tally(before, layout)
    result, _ = hidden_and_tally(module, layout)
    torch.testing.assert_close(result, expected)
    added = module.lm.model.layers[0].mlp.up_proj.lora_B["default"].weight[:, 4:]
    assert not added.any()
    train(module)
    assert added.any()


def test_an_adapter_with_rows_starts_a_training_without_rows(
    trained: tuple[AdaptiveLM, Path],
) -> None:
    """Bug: objective.mask=noise refused every adapter with adaptive tokens."""
    before, folder = trained
    lm = base_model()
    adapt(lm, RANK_4, adaptive=())
    begin_with(lm, saved_in(folder / "adapter"))
    pairs = adapter_weights(lm.state_dict())
    saved = before.lm.state_dict()
    assert pairs and all(torch.equal(saved[name], pairs[name]) for name in pairs)


@pytest.mark.parametrize(
    ("settings", "ids", "reason"),
    [
        ({"rank": 2}, ADAPTIVE, "lora.rank must be at least 4 with model.adapter="),
        ({"rank": 4, "targets": ["q_proj"]}, ADAPTIVE, "the layers of lora.targets"),
        (
            {"rank": 4},
            (44, 46, 47),
            r"adaptive ids \[44, 46, 47\] of the data, got \[45",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    settings: dict[str, Any],
    ids: tuple[int, ...],
    reason: str,
    trained: tuple[AdaptiveLM, Path],
) -> None:
    lm = base_model()
    adapt(lm, LoraSettings(**settings), adaptive=ids)
    with pytest.raises(UserError, match=reason):
        begin_with(lm, saved_in(trained[1] / "adapter"))


def test_an_adapter_of_another_scaling_is_refused(
    trained: tuple[AdaptiveLM, Path],
) -> None:
    """Bug: an adapter of peft with use_rslora or alpha_pattern began with other outputs."""
    config = trained[1] / "adapter" / "adapter_config.json"
    described = read_json(config)
    for name, value in (("use_rslora", True), ("alpha_pattern", {"up_proj": 64})):
        write_json(config, described | {name: value})
        lm = base_model()
        adapt(lm, RANK_4, adaptive=ADAPTIVE)
        with pytest.raises(UserError, match=f"lora_alpha / r, got {name}="):
            begin_with(lm, saved_in(config.parent))


def test_an_adapter_of_another_model_is_refused(
    trained: tuple[AdaptiveLM, Path],
) -> None:
    config = base_model().config
    config.intermediate_size *= 2
    lm = LlamaForCausalLM(config)
    adapt(lm, RANK_4, adaptive=ADAPTIVE)
    with pytest.raises(UserError, match="must be an adapter of model.path"):
        begin_with(lm, saved_in(trained[1] / "adapter"))
    with pytest.raises(UserError, match="without adapter_config.json"):
        _ = ModelConfig(adapter=str(trained[1] / "nowhere")).adapter_folders


def test_an_adapter_without_weights_is_refused(tmp_path: Path) -> None:
    """Bug: a folder with an adapter's configuration alone ended in FileNotFoundError."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="and adapter_model.safetensors"):
        _ = ModelConfig(adapter=str(tmp_path)).adapter_folders


def test_training_continues_a_head_with_its_adapter(
    trained: tuple[AdaptiveLM, Path],
) -> None:
    folder = trained[1] / "adapter"
    head = PreviousTokenHead(8, torch.float32)
    torch.nn.init.normal_(head.w2.weight)
    weights = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    other = PreviousTokenHead(8, torch.float32)
    begin_head(other, saved_in(folder))  # it has no head, so this changes nothing
    assert not other.w2.weight.any()
    write_head(weights, folder, torch.float32)
    begin_head(other, saved_in(folder))
    assert torch.equal(other.w2.weight, head.w2.weight)
    with pytest.raises(UserError, match="objective.previous_token must be true"):
        begin_head(None, saved_in(folder))
    with pytest.raises(UserError, match="of this model's width 6"):
        begin_head(PreviousTokenHead(6, torch.float32), saved_in(folder))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("adapter_model.safetensors", b"{", "header"),
        ("head.safetensors", b"{", "header"),
        ("adapter_config.json", b"{", "Expecting property name"),
        ("adapter_config.json", b'{"peft_type": "IA3"}', "peft_type=IA3"),
    ],
)
def test_a_damaged_or_foreign_adapter_is_refused_before_the_model_is_loaded(
    file: str, content: bytes, reason: str, trained: tuple[AdaptiveLM, Path]
) -> None:
    """Bug: each file ended in a traceback of its library, after the base model was loaded."""
    folder = trained[1] / "adapter"
    (folder / file).write_bytes(content)
    given = [f"model.adapter={folder}", "lora.rank=4", "model=tiny", "plan=true"]
    config = settings("train", TrainConfig, given)
    message = f"^model.adapter={folder} must be an export's adapter, got .*{reason}"
    with pytest.raises(UserError, match=message):
        read_spec(config, None)


def scaled_copy(folder: Path, factor: float) -> Path:
    """Return a copy of an adapter's folder, and of its head, with all values multiplied."""
    copy = folder.with_name(f"times-{factor:g}")
    copy.mkdir()
    write_json(copy / "adapter_config.json", read_json(folder / "adapter_config.json"))
    for path in folder.glob("*.safetensors"):
        values = {name: factor * value for name, value in load_file(path).items()}
        save_file(values, copy / path.name)
    return copy


def test_training_starts_from_the_mean_of_adapters_and_heads(
    trained: tuple[AdaptiveLM, Path],
) -> None:
    """The mean of an adapter with its threefold has twice its values; of one adapter, its own."""
    module, folder = trained[0], trained[1] / "adapter"
    saved = PreviousTokenHead(8, torch.float32)
    torch.nn.init.normal_(saved.w2.weight)
    weights = {f"head.{name}": tensor for name, tensor in saved.state_dict().items()}
    write_head(weights, folder, torch.float32)
    threefold = scaled_copy(folder, 3)
    for folders, factor in (([folder], 1), ([folder, threefold], 2)):
        lm, head = adapted(RANK_4).lm, PreviousTokenHead(8, torch.float32)
        start_from(folders, lm, head, with_head=True, gated=True)
        ours = {**adapter_weights(lm.state_dict()), **head.state_dict()}
        theirs = {**adapter_weights(module.lm.state_dict()), **saved.state_dict()}
        for name, value in ours.items():
            torch.testing.assert_close(value, factor * theirs[name], msg=name)
    with pytest.raises(UserError, match=r"head if and only if.*got head.safetensors"):
        (threefold / "head.safetensors").unlink()
        start_from([folder, threefold], lm, head, with_head=True, gated=True)
    start_from([folder, threefold], lm, None, with_head=False, gated=True)


def test_a_mean_of_other_ranks_is_refused(trained: tuple[AdaptiveLM, Path]) -> None:
    folder = trained[1] / "adapter"
    other = scaled_copy(folder, 1)
    config = other / "adapter_config.json"
    write_json(config, read_json(config) | {"r": 3})
    with pytest.raises(UserError, match=f"{other} must have the rank 4 .* got 3"):
        start_from(
            [folder, other], adapted(RANK_4).lm, None, with_head=False, gated=True
        )
    (other / WEIGHTS).unlink()
    with pytest.raises(UserError, match="^model.mean_with must be an export"):
        _ = ModelConfig(adapter=str(folder), mean_with=[str(other)]).adapter_folders
    with pytest.raises(ValueError, match="model.mean_with needs model.adapter"):
        ModelConfig(mean_with=[str(other)])


def test_a_gated_adapter_does_not_begin_an_ungated_training(
    trained: tuple[AdaptiveLM, Path],
) -> None:
    """Bug: an adapter of drafts was applied to all tokens without a word.

    The same bug later, for a folder of lora=uno: it has adaptive.json beside the adapter.
    """
    folder = trained[1] / "adapter"
    lm = adapted(RANK_4).lm
    for place in (folder.parent, folder):
        write_json(place / "adaptive.json", {"gated": True})
        with pytest.raises(
            UserError, match=r"lora\.gated must be true with model\.adapter="
        ):
            start_from([folder], lm, None, with_head=False, gated=False)
        (place / "adaptive.json").unlink()
