"""Compare the plan's formulas with counted operations and drawn layouts."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from conf.architecture import skeleton
from conf.errors import UserError, counted
from conf.runs.files import read_json, with_checksum, write_json
from conf.runs.fingerprint import MANIFEST
from conf.runs.stage import read_manifest
from conf.settings.compose import settings
from tests.conftest import text_vocab, tiny_llama
from tests.infer.engine.test_families import LATENT, MIXED, tiny
from train.attention import dense_mask
from train.config import LoraSettings, ObjectiveConfig, TrainConfig
from train.data import lay_out
from train.engine import model_states
from train.flops import (
    causal_pairs,
    expected_pairs,
    expected_work,
    pair_width,
    peak_flops,
    step_flops,
)
from train.inputs import read_inputs
from train.objective import IGNORE
from train.plan import DEVICES, plan
from train.spec import Memory, estimate_memory, read_spec

VOCAB = text_vocab(100, 7)
TINY = tiny_llama().config
EXPERIMENTS = Path(__file__).parents[2] / "conf" / "train" / "experiment"
RECIPES = sorted(
    path.stem
    for path in EXPERIMENTS.glob("*.yaml")
    if not path.stem.startswith(("demo", "smollm2", "qwen"))
)


def planned(*overrides: str) -> dict[str, str]:
    config = settings("train", TrainConfig, ["plan=true", *overrides])
    inputs = read_inputs(config) if config.data.path else None
    return plan(config, inputs, read_spec(config, inputs))


@pytest.mark.parametrize(
    ("overrides", "verdict"),
    [
        *(([f"experiment={recipe}"], "fits") for recipe in RECIPES),
        (["experiment=sdsat_7b_l5", "plan_device=24"], "does not fit: "),
        (["experiment=sdsat_7b_l5", "plan_device=44"], "fits: "),
    ],
)
def test_every_recipe_fits_its_device(overrides: list[str], verdict: str) -> None:
    lines = planned(*overrides)
    assert lines["memory per GPU"].startswith(verdict), lines["memory per GPU"]


def test_a_plan_for_one_rank_counts_in_the_singular() -> None:
    """Bug: it had "1 ranks" and "1 accumulations"."""
    lines = planned(
        "experiment=demo", "plan_ranks=1", "global_batch=4", "micro_batch=4"
    )
    assert lines["batch"].endswith("= 1 rank x 4 x 1 accumulation")
    assert lines["memory per machine"].endswith("to load the model on 1 rank")
    assert [counted(n, "rank") for n in (0, 1, 1024)] == [
        "0 ranks",
        "1 rank",
        "1,024 ranks",
    ]


@pytest.mark.parametrize("ranks", [8, 12, 20])
@pytest.mark.parametrize(
    ("zero", "device", "host"),
    [
        ("zero1", (4, 18), (0, 0)),
        ("zero2", (2, 18), (0, 0)),
        ("zero3", (0, 18), (0, 0)),
        ("zero2_offload", (2, 0), (6, 0)),
        ("zero3_offload", (0, 0), (0, 27)),
    ],
)
def test_states_are_divided_by_all_ranks(
    zero: str, device: tuple[int, int], host: tuple[int, int], ranks: int
) -> None:
    """Bug: 12 ranks were estimated as 8, and 20 as 16.

    A pair is the bytes of a parameter that each rank has, and that all ranks divide.
    """
    config = settings("train", TrainConfig, [f"deepspeed={zero}"])
    expected = tuple(120 * (each + shared / ranks) for each, shared in (device, host))
    assert model_states(120, 120, 0, config, ranks=ranks) == expected


def test_settings_that_save_memory() -> None:
    def memory(*overrides: str) -> Memory:
        arguments = ["experiment=sdsat_7b_l5", "objective=branch", "plan=true"]
        config = settings("train", TrainConfig, [*arguments, *overrides])
        return estimate_memory(read_spec(config, None), config, ranks=8)

    zero2, offloaded = memory(), memory("deepspeed=zero2_offload")
    assert memory("deepspeed=zero3").states < zero2.states
    assert zero2.states < memory("deepspeed=zero0").states
    assert offloaded.states < zero2.states and offloaded.host > zero2.host == 0
    stored = memory("model.activation_checkpointing=false")
    assert zero2.activations < 0.2 * stored.activations
    gated = ["lora.rank=8", "lora.gated=true"]
    small = memory("model.activation_checkpointing=false", *gated)
    assert small.states < 0.6 * zero2.states
    assert small.activations < 0.5 * stored.activations


def test_a_plan_reads_the_data(data_folder: Path) -> None:
    base = ["model=tiny", "plan_ranks=1", "steps=10", "global_batch=4"]
    lines = planned(*base, f"data.path={data_folder}")
    sequences = read_manifest(data_folder, "shards", "data.path")["train"]["sequences"]
    assert lines["data"].endswith(f"read {40 / sequences:.2f} times")


@pytest.mark.parametrize("tied", [False, True])
def test_operations_equal_torchs_count(tied: bool) -> None:
    config = LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": tied})
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        lm(input_ids=torch.zeros(3, 50, dtype=torch.long)).logits.sum().backward()
    run = TrainConfig(objective=ObjectiveConfig(name="causal"), global_batch=3)
    # torch also counts the pairs that the causal mask forbids: 2 products forward, 4 backward.
    forbidden = 3 * config.num_hidden_layers * (50 * 49 / 2) * 4 * config.hidden_size
    expected = step_flops(lm, run, seq_len=50) + 3 * forbidden
    assert counter.get_total_flops() == expected


def test_latent_attention_counts_its_own_widths() -> None:
    """Bug: products of keys had the width of hidden_size / heads, 2.5 times too few for DeepSeek's."""
    sizes = {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
    config = tiny("deepseek_v2", **LATENT | sizes).config
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    counts = []
    for length in (32, 64):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            lm(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
        counts.append(counter.get_total_flops())
    pairs = config.num_hidden_layers * 2 * 32**2
    heads = config.num_attention_heads
    assert 2 * heads * pair_width(config) == (counts[1] - 2 * counts[0]) / pairs


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", ["causal", "dual", "branch"])
def test_expected_work_matches_drawn_layouts(name: str, window: int | None) -> None:
    objective = ObjectiveConfig(name=name, L=4)
    n, draws = 4000, 8
    sequence = SimpleNamespace(documents=np.zeros(n, int), tokens=np.full(n, 50))
    drawn = np.zeros(3)
    for index in range(draws):
        layout = lay_out([sequence], [index], VOCAB, objective, seed=(0,))
        drafts = layout.offsets[:, n:] > 0
        # A branch column attends to its prefix and to as many columns of its window as its offset.
        seen = (keys(layout.positions[:, n:], window) * drafts).sum()
        drawn += (
            layout.ids[:, :n].size + drafts.sum(),
            (layout.labels != IGNORE).sum(),
            keys(layout.positions[:, :n], window).sum() + seen,
        )
    work = expected_work(objective, n)
    expected = (work.rows, work.predicted, expected_pairs(objective, n, window))
    assert drawn / draws == pytest.approx(np.array(expected), rel=0.01)


def keys(positions: np.ndarray, window: int | None) -> np.ndarray:
    """Return the number of keys that the token at each position attends to."""
    return np.minimum(positions + 1, window or np.inf)


def test_the_masks_of_training_have_the_counted_pairs() -> None:
    sequence = SimpleNamespace(documents=np.zeros(60, int), tokens=np.full(60, 50))
    objective = ObjectiveConfig(name="branch", L=4, start_rate=0.3)
    layout = lay_out([sequence], [0], VOCAB, objective, seed=(0,))
    positions, offsets = torch.tensor(layout.positions), torch.tensor(layout.offsets)
    drafts = layout.offsets[0, 60:] > 0
    for window in (None, 2, 7):
        mask = dense_mask(positions, offsets, 60, window)[0, 0].sum(-1).numpy()
        expected = keys(layout.positions[0, 60:], window)
        assert np.array_equal(mask[drafts], expected[drafts])


def test_layers_with_a_sliding_window_count_its_pairs() -> None:
    """Regression: each layer counted full attention, so MFU was too high."""
    assert causal_pairs(5, 3) == 1 + 2 + 3 + 3 + 3
    assert causal_pairs(2, 3) == causal_pairs(2, None) == 1 + 2
    config = tiny("gemma3_text", **MIXED).config  # of two layers one has a window of 6
    full = copy.deepcopy(config)
    full.layer_types = ["full_attention"] * 2
    run = TrainConfig(objective=ObjectiveConfig(name="causal"), global_batch=3)
    # Ten tokens: 55 pairs, within the window 1 + 2 + 3 + 4 + 5 + 5 x 6 = 45. A pair takes 4
    # operations for each element of a query, and the backward pass twice as many.
    width = config.num_attention_heads * config.head_dim
    saved = 3 * 3 * 4 * width * (55 - 45)
    lm, full_lm = skeleton(config), skeleton(full)
    assert step_flops(full_lm, run, seq_len=10) == saved + step_flops(
        lm, run, seq_len=10
    )
    # A gated adapter's trunk has no backward pass.
    gated = replace(
        run,
        objective=ObjectiveConfig(name="branch", start_rate=1e-9),
        lora=LoraSettings(rank=1, gated=True),
    )
    difference = step_flops(full_lm, gated, seq_len=10) - step_flops(
        lm, gated, seq_len=10
    )
    assert difference == pytest.approx(saved / 3, rel=1e-6)


def test_peak_flops_by_device_name() -> None:
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert all(peak_flops(name) for name, _ in DEVICES.values())


def test_the_plan_counts_the_previous_token_head() -> None:
    """Bug: the plan and the memory check left out its 3 d^2 weights and their optimizer states."""
    trained = []
    for head in ("true", "false"):
        given = ["plan=true", "experiment=sdsat_7b_best"]
        given.append(f"objective.previous_token={head}")
        config = settings("train", TrainConfig, given)
        trained.append(read_spec(config, None).trained)
    assert trained[0] - trained[1] == 3 * 4096**2


def test_a_plan_refuses_what_a_training_refuses(data_folder: Path) -> None:
    """Bug: hours were planned for more diverse ids than the data has."""
    with pytest.raises(
        UserError, match="objective.L must be at most the .* diverse ids"
    ):
        planned(f"data.path={data_folder}", "objective.diverse=true", "objective.L=50")


def test_data_without_training_sequences_are_refused(
    data_folder: Path, tmp_path: Path
) -> None:
    """Bug: a plan ended in a ZeroDivisionError; a training asked to copy the folder again."""
    folder = Path(shutil.copytree(data_folder, tmp_path / "data"))
    manifest = read_json(folder / MANIFEST)
    del manifest["crc32"]
    manifest["train"]["sequences"] = 0
    write_json(folder / MANIFEST, with_checksum(manifest))
    with pytest.raises(UserError, match="must have training sequences, got none"):
        planned(f"data.path={folder}")
