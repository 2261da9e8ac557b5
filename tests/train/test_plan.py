"""The plan's arithmetic against what it stands for: counted operations, drawn layouts, kept tensors."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from conf import UserError, settings
from conf.stage import read_manifest
from data_prep.vocab import Vocab
from train import checks
from train.attention import branch_mask, register
from train.checks import check_memory
from train.config import LoraSettings, ObjectiveConfig, TrainConfig
from train.data import lay_out, to_tensors
from train.flops import expected_work, matrix_parameters, peak_flops, step_flops
from train.lora import Gate, adapt
from train.memory import (
    GIB,
    Memory,
    States,
    engine_states,
    estimate_memory,
    saved_bytes,
)
from train.model import AdaptiveLM
from train.objective import IGNORE, branch
from train.plan import DEVICES, plan, plan_device, print_plan
from train.pretrained import load_trainable, model_config, skeleton

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
    p.stem
    for p in EXPERIMENTS.glob("*.yaml")
    if not p.stem.startswith(("demo", "small"))
)
PARAMETERS = {
    "7b": 6_738_546_688,
    "13b": 13_016_028_160,
    "34b": 33_743_970_304,
    "1b": 1_346_471_936,
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_its_device(recipe: str) -> None:
    config = settings("train", TrainConfig, [f"experiment={recipe}"])
    lines = plan(config)
    assert lines["memory per GPU"].startswith("fits: "), lines["memory per GPU"]
    assert (
        f"{config.plan_ranks} ranks" in lines["batch"] and "(assumed)" in lines["hours"]
    )
    assert config.objective.diverse == ("_d_" in recipe)
    assert f"_l{config.objective.L}" in recipe or recipe.endswith("_best")
    architecture = model_config(config.model)
    parameters = sum(
        parameter.numel() for parameter in skeleton(architecture).parameters()
    )
    size = next(part for part in recipe.split("_") if part in PARAMETERS)
    spare = (
        2 * 16 * architecture.hidden_size if "python" in recipe else 0
    )  # rows that Python's models lack
    assert parameters == PARAMETERS[size] - spare
    if "deepseek" not in recipe:
        assert architecture.rope_parameters["rope_theta"] == 1e6  # Code Llama §2.4


def test_the_printed_plan_needs_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(settings("train", TrainConfig, ["experiment=sdsat_7b_l5"]))
    printed = capsys.readouterr().out
    for part in (
        "6.74B parameters",
        "dual, L=5",
        "2,000",
        "4.19M computed",
        "ZeRO stage 2",
        "GiB",
    ):
        assert part in printed


def test_what_cannot_fit_is_said() -> None:
    config = settings("train", TrainConfig, ["experiment=sdsat_34b_l7", "plan_ranks=8"])
    assert plan(config)["memory per GPU"].startswith("does not fit: ")
    config = settings(
        "train", TrainConfig, ["experiment=sdsat_7b_l5", "plan_device=24"]
    )
    lines = plan(config)
    assert "does not fit" in lines["memory per GPU"] and "hours" not in lines
    lines = plan(replace(config, peak_tflops=100.0))
    assert "of 100 TFLOP/s" in lines["hours"]
    with pytest.raises(UserError, match=r"plan_device must be a100_40gb, .* got b17"):
        plan_device("b17")


def test_offloading_moves_the_optimizer_to_the_machine() -> None:
    setting = "deepspeed.zero_optimization.offload_optimizer.device=cpu"
    here = settings("train", TrainConfig, ["experiment=sdsat_7b_l5"])
    there = settings("train", TrainConfig, ["experiment=sdsat_7b_l5", setting])
    architecture = model_config(here.model)
    result = [
        estimate_memory(architecture, c, ranks=8, seq_len=4096, cuda=True)
        for c in (here, there)
    ]
    assert result[0].host == result[1].optimizer == 0
    assert result[1].host > result[0].optimizer
    assert "states offloaded" in plan(there)["memory per machine"]


def test_dense_attention_on_a_gpu_costs_its_mask() -> None:
    """objective.attention=dense: a mask of every branch column and column, once as bool and in each layer."""
    common = [
        "model=demo",
        "objective=branch",
        "global_batch=1",
        "model.shape.num_hidden_layers=4",
    ]
    flex, dense = (
        settings("train", TrainConfig, [*common, f"objective.attention={name}"])
        for name in ("flex", "dense")
    )
    architecture = model_config(flex.model, vocab=VOCAB)
    result = [
        estimate_memory(architecture, c, ranks=1, seq_len=1000, cuda=True)
        for c in (flex, dense)
    ]
    mask = 300 * 1300  # L=5: 0.3 branch columns for each token
    assert result[1].activations - result[0].activations == mask + 4 * 2 * mask


def test_lora_needs_no_optimizer_for_what_is_frozen() -> None:
    common = ["experiment=sdsat_7b_l5"]
    whole, adapter = (
        settings("train", TrainConfig, [*common, f"lora.rank={rank}"])
        for rank in (0, 8)
    )
    architecture = model_config(whole.model)
    result = [
        estimate_memory(architecture, c, ranks=8, seq_len=4096, cuda=True)
        for c in (whole, adapter)
    ]
    assert result[0].weights == result[1].weights
    assert 0 < result[1].optimizer < result[0].optimizer / 100
    lines = plan(adapter)
    assert lines["trained"] == "LoRA of rank 8"
    assert float(lines["operations"].split(";")[0]) < 0.8 * float(
        plan(whole)["operations"].split(";")[0]
    )


def test_a_gated_adapter_costs_the_trunk_no_backward_pass() -> None:
    """Operations are those that torch counts in a step, beside the adapter's own; memory is less too."""
    common = [
        "experiment=sdsat_7b_l5",
        "objective=branch",
        "model.activation_checkpointing=false",
        "lora.rank=8",
    ]
    open_, gated = (
        settings("train", TrainConfig, [*common, f"lora.gated={gated}"])
        for gated in (False, True)
    )
    architecture = model_config(gated.model, vocab=None)
    memory = [
        estimate_memory(architecture, c, ranks=8, seq_len=16384, cuda=True)
        for c in (open_, gated)
    ]
    assert memory[1].activations < 0.5 * memory[0].activations

    lm = AutoModelForCausalLM.from_config(TINY)
    lm.set_attn_implementation(register("eager"))
    adapt(lm, LoraSettings(rank=1, gated=True), adaptive=[3])
    module = AdaptiveLM(lm, chunk=64, L=5, gate=Gate(lm))
    tokens = np.random.default_rng(0).integers(4, 90, size=(3, 64))
    windows = [(np.arange(0, 60, 2), np.full(30, 5))] * 3
    layout = branch(
        tokens,
        np.zeros_like(tokens),
        windows,
        np.ones_like(tokens, dtype=bool),
        [3],
        multiple=1,
    )
    with FlopCounterMode(display=False) as counter:
        module(**to_tensors(layout, torch.device("cpu")))[0].backward()
    layers, head = matrix_parameters(TINY)
    m, n = layout.ids.shape[1] - 64, 64
    products = 2 * layers * (n + 2 * m) + 2 * 2 * head * m
    scores = 4 * TINY.hidden_size * TINY.num_hidden_layers * (n * n + 3 * m * (n + m))
    assert (
        3 * (products + scores)
        < counter.get_total_flops()
        < 1.15 * 3 * (products + scores)
    )


def test_a_plan_reads_the_data(data_folder: Path) -> None:
    base = [
        "model=demo",
        "plan_ranks=1",
        "steps=10",
        "global_batch=4",
        f"data.path={data_folder}",
    ]
    lines = plan(settings("train", TrainConfig, base))
    sequences = read_manifest(data_folder, "shards", "data.path")["train"]["sequences"]
    assert "4 sequences of 128 " in lines["batch"]
    assert lines["data"].endswith(f"read {40 / sequences:.2f} times")
    with pytest.raises(
        UserError, match="at most 100 tokens, the context of llama, got 128"
    ):
        plan(
            settings(
                "train", TrainConfig, [*base, "model.shape.max_position_embeddings=100"]
            )
        )


def test_training_refuses_what_cannot_fit(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = read_manifest(data_folder, "shards", "data.path")
    base = ["model=demo", f"data.path={data_folder}"]
    checks.check_start(settings("train", TrainConfig, base), data)
    monkeypatch.setattr(checks, "machine_memory", lambda: 0.02 * GIB)
    message = r"memory must suffice for .*: it needs 0\.\d GiB, .* got 0\.0 GiB of this machine"
    with pytest.raises(UserError, match=message):
        checks.check_start(settings("train", TrainConfig, base), data)
    checks.check_start(
        settings("train", TrainConfig, [*base, "memory_check=false"]), data
    )


@pytest.mark.parametrize("part", ["loading", "host"])
def test_a_machine_with_gpus_needs_memory_of_its_own(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the GPU alone was checked: eight ranks that loaded 34B filled the machine, which killed them."""
    monkeypatch.setattr(checks, "machine_memory", lambda: 8 * GIB)
    gpu = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    parts = dict.fromkeys(
        ("weights", "gradients", "optimizer", "activations", "logits", "buffers"), GIB
    )
    memory = Memory(moment="the loss", **parts, host=0.0, loading=0.0)
    check_memory(memory, cuda=True)
    with pytest.raises(
        UserError, match=r"it needs 16\.0 GiB, .* got 8\.0 GiB of this machine"
    ):
        check_memory(replace(memory, **{part: 2 * GIB}), cuda=True)


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    config = LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": tied})
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        lm(input_ids=torch.zeros(3, 50, dtype=torch.long)).logits.sum().backward()
    run = TrainConfig(objective=ObjectiveConfig(name="causal"), global_batch=3)
    ours = step_flops(config, run, seq_len=50)
    # torch counts the pairs that the causal mask forbids, in two products forward and four backward.
    forbidden = 3 * config.num_hidden_layers * (50 * 49 / 2) * 4 * config.hidden_size
    assert counter.get_total_flops() == ours.model + 3 * forbidden
    run.model.activation_checkpointing = True
    again = step_flops(config, run, seq_len=50)
    head = 2 * 3 * 50 * 97 * 32
    assert again.model == ours.model and again.hardware == ours.model * 4 / 3 - head


@pytest.mark.parametrize(
    ("name", "wide"),
    [("causal", 0.0), ("basic", 0.0), ("dual", 0.0), ("branch", 0.0), ("branch", 0.3)],
)
def test_expected_work_is_that_of_drawn_layouts(name: str, wide: float) -> None:
    objective = ObjectiveConfig(name=name, L=4, wide_share=wide, L_max=9)
    n, draws = 4000, 8
    sequence = type(
        "Sequence",
        (),
        {"documents": np.zeros(n, dtype=np.int64), "tokens": np.full(n, 50)},
    )
    rows = pairs = predicted = 0.0
    for index in range(draws):
        layout = lay_out([sequence], [index], VOCAB, objective, seed=(0,))
        columns = layout.offsets[:, n:] > 0
        rows += layout.ids[:, :n].size + columns.sum()
        predicted += (layout.labels != IGNORE).sum()
        # A branch column sees its prefix, and as many of its window as its offset says.
        pairs += (
            len(layout.ids) * n * (n + 1) / 2
            + ((layout.positions[:, n:] + 1) * columns).sum()
        )
    work = expected_work(objective, n)
    assert rows / draws == pytest.approx(work.rows, rel=0.01)
    assert predicted / draws == pytest.approx(work.predicted, rel=0.01)
    assert pairs / draws == pytest.approx(work.pairs, rel=0.01)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_go_by_the_devices_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak
    assert peak_flops(device, 50.0) == 50e12
    assert all(peak_flops(name) for name, _ in DEVICES.values())


def test_zero_stages_divide_what_they_should() -> None:
    def states(stage: int, g: int = 2) -> States:
        sizes = {"parameters": 1000, "trained": 1000, "largest_group": 900, "ranks": 4}
        return engine_states(
            **sizes, stage=stage, b=2, g=g, accumulates=True, zero={}, cuda=False
        )

    stages = [states(stage) for stage in range(4)]
    assert [at.weights for at in stages] == [2000, 2000, 2000, 500]
    assert [at.optimizer for at in stages] == [12000, 3000, 3000, 3000]
    assert [at.forward[0] for at in stages] == [2000, 2000, 500, 500]
    wide = [states(stage, g=4) for stage in (2, 3)]
    assert [at.forward[0] for at in wide] == [at.step[0] for at in wide] == [1000, 1000]
    assert wide[0].step[1] == 0, "the sum is what the optimizer reads"


@pytest.mark.parametrize("objective", ["causal", "branch"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_tensors_are_those_of_a_real_forward(
    attention: str, dtype: torch.dtype, objective: str
) -> None:
    shape = [
        "model=demo",
        f"model.attention={attention}",
        "model.shape.num_hidden_layers=2",
    ]
    config = settings("train", TrainConfig, [*shape, f"objective={objective}"])
    lm = load_trainable(config.model, vocab=VOCAB, dtype=dtype, seed=0)
    own = {parameter.untyped_storage().data_ptr() for parameter in lm.parameters()}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    sequence = SimpleNamespace(
        documents=np.zeros(128, dtype=np.int64), tokens=np.full(128, 50)
    )
    layout = to_tensors(
        lay_out([sequence], [0], VOCAB, config.objective, seed=(0,)),
        torch.device("cpu"),
    )
    mask = branch_mask(layout["positions"], layout["offsets"], 128)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder = lm.get_decoder()
        decoder(
            layout["ids"],
            attention_mask=mask,
            position_ids=layout["positions"],
            use_cache=False,
        )
    real = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    architecture = model_config(config.model, vocab=VOCAB)
    branches = layout["ids"].shape[1] - 128
    layer, rest = saved_bytes(
        architecture,
        attention=attention,
        dtype=dtype,
        trunk=128,
        branches=branches,
        cuda=False,
    )
    assert 2 * layer + rest == pytest.approx(real, rel=0.02)


def test_a_path_that_does_not_exist_is_reported_at_once(tmp_path: Path) -> None:
    """Transformers asked the hub and retried for half a minute."""
    config = settings("train", TrainConfig, [f"model.path={tmp_path / 'absent'}"])
    with pytest.raises(UserError, match=r"model\.path=.*got no config\.json"):
        model_config(config.model, vocab=VOCAB)
    config = settings("train", TrainConfig, [])
    with pytest.raises(UserError, match=r"'model\.path' is required"):
        model_config(config.model, vocab=VOCAB)


def test_random_weights_take_the_datas_vocabulary() -> None:
    """The exported demo model ended its texts at CodeLlama's id 2, a control piece of another meaning."""
    result = model_config(
        settings("train", TrainConfig, ["model=demo"]).model, vocab=VOCAB
    )
    assert (result.vocab_size, result.bos_token_id, result.eos_token_id) == (100, 3, 4)
