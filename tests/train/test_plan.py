"""The plan's arithmetic against counted operations and drawn layouts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from conf import settings
from conf.stage import read_manifest
from data_prep.vocab import Vocab
from train.attention import register
from train.config import LoraSettings, ObjectiveConfig, TrainConfig
from train.data import lay_out, to_tensors
from train.flops import expected_work, matrix_parameters, peak_flops, step_flops
from train.lora import Gate, adapt
from train.model import AdaptiveLM
from train.objective import IGNORE, branch
from train.plan import DEVICES, estimate_memory, plan, print_plan
from train.pretrained import model_config

VOCAB = Vocab(
    size=100, bos=3, eos=4, pre=None, suf=None, mid=None, eot=None, adaptive=(7,)
)
TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
EXPERIMENTS = Path(__file__).parents[2] / "conf" / "train" / "experiment"
RECIPES = sorted(
    path.stem for path in EXPERIMENTS.glob("*.yaml") if not path.stem.startswith("demo")
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_its_device(recipe: str) -> None:
    config = settings("train", TrainConfig, [f"experiment={recipe}"])
    lines = plan(config)
    assert lines["memory per GPU"].startswith("fits"), lines["memory per GPU"]
    assert f"{config.plan_ranks} ranks" in lines["batch"]
    assert "(assumed)" in lines["hours"]


def test_the_printed_plan_needs_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(settings("train", TrainConfig, ["experiment=sdsat_7b_l5"]))
    printed = capsys.readouterr().out
    for part in ("training plan", "dual, L=5", "ZeRO stage 2"):
        assert part in printed


@pytest.mark.parametrize(
    ("overrides", "verdict"),
    [
        (["experiment=sdsat_34b_l7", "plan_ranks=8"], "does not fit: "),
        (["experiment=sdsat_7b_l5", "plan_device=24"], "does not fit: "),
        (["experiment=sdsat_7b_l5", "plan_device=44"], "fits closely: "),
        (["experiment=sdsat_7b_l5"], "fits: "),
    ],
)
def test_verdicts_of_memory(overrides: list[str], verdict: str) -> None:
    lines = plan(settings("train", TrainConfig, overrides))
    assert lines["memory per GPU"].startswith(verdict), lines["memory per GPU"]


def test_settings_that_save_memory() -> None:
    def memory(*overrides: str) -> tuple[float, float, float]:
        arguments = ["experiment=sdsat_7b_l5", "objective=branch", *overrides]
        config = settings("train", TrainConfig, arguments)
        architecture = model_config(config.model)
        result = estimate_memory(architecture, config, ranks=8, seq_len=16384)
        return result.states, result.activations, result.host

    states, activations, host = memory()
    assert memory("deepspeed=zero3")[0] < states < memory("deepspeed=zero1")[0]
    assert memory("deepspeed=zero1")[0] < memory("deepspeed=zero0")[0]
    offloaded = memory("deepspeed=zero2_offload")
    assert offloaded[0] < states and offloaded[2] > host == 0
    assert memory("lora.rank=8")[0] < 0.6 * states
    stored = "model.activation_checkpointing=false"
    assert activations < 0.2 * memory(stored)[1]
    gated = memory(stored, "lora.rank=8", "lora.gated=true")
    assert gated[1] < 0.5 * memory(stored)[1]
    assert memory("dtype=float32")[0] > states


def test_a_gated_adapter_costs_the_trunk_no_backward_pass() -> None:
    """Operations are those that torch counts, beside the adapter's own."""
    lm = AutoModelForCausalLM.from_config(TINY)
    lm.set_attn_implementation(register("eager"))
    adapt(lm, LoraSettings(rank=1, gated=True), adaptive=[3])
    module = AdaptiveLM(lm, chunk=64, L=5, gate=Gate(lm))
    tokens = np.random.default_rng(0).integers(4, 90, size=(3, 64))
    windows = [(np.arange(0, 60, 2), np.full(30, 5))] * 3
    free = np.ones_like(tokens, dtype=bool)
    layout = branch(tokens, np.zeros_like(tokens), windows, free, [3], multiple=1)
    with FlopCounterMode(display=False) as counter:
        module(**to_tensors(layout, torch.device("cpu")))[0].backward()
    layers, head = matrix_parameters(TINY)
    m, n = layout.ids.shape[1] - 64, 64
    products = 2 * layers * (n + 2 * m) + 2 * 2 * head * m
    scores = 4 * TINY.hidden_size * TINY.num_hidden_layers * (n * n + 3 * m * (n + m))
    expected = 3 * (products + scores)
    assert expected < counter.get_total_flops() < 1.15 * expected


def test_a_plan_reads_the_data(data_folder: Path) -> None:
    base = ["model=demo", "plan_ranks=1", "steps=10", "global_batch=4"]
    lines = plan(settings("train", TrainConfig, [*base, f"data.path={data_folder}"]))
    sequences = read_manifest(data_folder, "shards", "data.path")["train"]["sequences"]
    assert "4 sequences of 128 " in lines["batch"]
    assert lines["data"].endswith(f"read {40 / sequences:.2f} times")


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    config = LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": tied})
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        lm(input_ids=torch.zeros(3, 50, dtype=torch.long)).logits.sum().backward()
    run = TrainConfig(objective=ObjectiveConfig(name="causal"), global_batch=3)
    # torch counts the pairs that the causal mask forbids: 2 products, 4 backward.
    forbidden = 3 * config.num_hidden_layers * (50 * 49 / 2) * 4 * config.hidden_size
    expected = step_flops(config, run, seq_len=50) + 3 * forbidden
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize(
    ("name", "wide"),
    [("causal", 0.0), ("basic", 0.0), ("dual", 0.0), ("branch", 0.0), ("branch", 0.3)],
)
def test_expected_work_is_that_of_drawn_layouts(name: str, wide: float) -> None:
    objective = ObjectiveConfig(name=name, L=4, wide_share=wide, L_max=9)
    n, draws = 4000, 8
    columns = {"documents": np.zeros(n, dtype=np.int64), "tokens": np.full(n, 50)}
    sequence = type("Sequence", (), columns)
    rows = pairs = predicted = 0.0
    for index in range(draws):
        layout = lay_out([sequence], [index], VOCAB, objective, seed=(0,))
        drafts = layout.offsets[:, n:] > 0
        rows += layout.ids[:, :n].size + drafts.sum()
        predicted += (layout.labels != IGNORE).sum()
        # A branch column sees its prefix, and as many of its window as its offset.
        pairs += len(layout.ids) * n * (n + 1) / 2
        pairs += ((layout.positions[:, n:] + 1) * drafts).sum()
    work = expected_work(objective, n)
    assert rows / draws == pytest.approx(work.rows, rel=0.01)
    assert predicted / draws == pytest.approx(work.predicted, rel=0.01)
    assert pairs / draws == pytest.approx(work.pairs, rel=0.01)


def test_peaks_go_by_the_devices_name() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert all(peak_flops(name) for name, _ in DEVICES.values())
