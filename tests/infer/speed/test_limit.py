"""The physical limit: its arithmetic against sizes and counted operations, and the measured device."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig

from infer.gpu_check import SHAPES, random_model
from infer.speed import limit as device
from infer.speed.limit import Limit, Needs, Speeds, bandwidth, measure_limit, seconds_of

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}


def needs(lm: torch.nn.Module) -> Needs:
    result = Needs.of(lm)
    assert result is not None
    return result


def counted(lm: torch.nn.Module, rows: int, context: int) -> int:
    """Operations of the library's own forward of rows behind a cached context."""
    lm.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache = lm(torch.ones(1, context, dtype=torch.long), use_cache=True).past_key_values
        before = counter.get_total_flops()
        lm(torch.ones(1, rows, dtype=torch.long), past_key_values=cache)
        return counter.get_total_flops() - before


def test_what_a_plain_step_reads() -> None:
    """By hand: two layers of width 32, 4 heads of 8, 2 key-value heads, a head of 199 rows; of the row that is
    fed an entry of the embedding, and keys and values that are written.
    """
    lm = random_model(SHAPES["tiny"], dtype=torch.bfloat16, device="cpu")
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32 + 2 * 32
    cache = 2 * 2 * 2 * 8
    assert needs(lm).weight_bytes == 2 * (2 * layer + 32 + 199 * 32)
    assert needs(lm).bytes(1, 100) == 2 * (2 * layer + 32 + 199 * 32 + 100 * cache + cache + 32)
    assert needs(lm).bytes(3, 100) == needs(lm).bytes(1, 100) + 2 * 2 * (cache + 32)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPES["tiny"]),
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64),
        MistralConfig(
            **SMALL, intermediate_size=48, num_key_value_heads=2, sliding_window=64, tie_word_embeddings=True
        ),
    ],
    ids=["llama", "gpt2", "mistral"],
)
def test_operations_are_those_of_the_librarys_forward(config, rows: int) -> None:
    lm = AutoModelForCausalLM.from_config(config).eval()
    assert needs(lm).flops(rows, 20) == pytest.approx(counted(lm, rows, 20), rel=0.01)


def test_a_tied_head_is_read_as_a_head_and_learned_positions_are_not() -> None:
    lm = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=97))
    positions = lm.transformer.wpe.weight.nbytes
    assert needs(lm).weight_bytes == sum(weight.nbytes for weight in lm.parameters()) - positions


def test_a_window_bounds_what_is_read() -> None:
    settings = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}
    wide, narrow = (
        needs(AutoModelForCausalLM.from_config(MistralConfig(**settings, sliding_window=window)))
        for window in (None, 16)
    )
    assert narrow.bytes(1, 16) == wide.bytes(1, 16) and narrow.bytes(1, 90) == wide.bytes(1, 16)
    assert narrow.flops(1, 90) == wide.flops(1, 15)


def test_a_forward_is_bound_by_memory_and_then_by_operations() -> None:
    need = Needs(1000, row_bytes=10, weight_flops=500, cache_bytes=2, pair_flops=4, windows=(None, None))
    limit = Limit("float32", need, Speeds(copy=90.0, read=100.0, flops=100.0))
    assert limit.seconds(1, 10) == (1000 + 10 + 10 * 2 * 2) / 100
    assert limit.seconds(4, 10) == 4 * (500 + 4 * 2 * 14) / 100
    description = limit.describe(10)
    assert description["forward_ms"][0] == [1, 1e3 * limit.seconds(1, 10)]
    assert description["weights_bytes"] == 1000


def test_a_call_is_timed_among_its_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take 2 ms, most of them longer for other work; the clock's own 0.1 ms counts for little."""
    now, calls = [0.0], [0]

    def task() -> None:
        now[0] += 0.002 if 20 < calls[0] < 30 else 0.005
        calls[0] += 1

    def clock() -> float:
        now[0] += 1e-4
        return now[0]

    monkeypatch.setattr(device, "clock", clock)
    assert seconds_of(task) == pytest.approx(0.002, rel=0.05)
    assert calls[0] > 50


def test_the_limit_of_a_model_is_measured_here(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixture of experts none is known."""
    monkeypatch.setattr(device, "SECONDS", 0.02)
    limit = measure_limit(llama)
    assert limit is not None and limit.dtype == "float32"
    message = limit.describe(256)
    assert min(message[f"{name}_per_second"] for name in ("copy_bytes", "read_bytes", "flops")) > 1e8
    ms = [item for _, item in message["forward_ms"]]
    assert ms == sorted(ms) and ms[0] > 0
    assert bandwidth(torch.device("cpu"), size=1).keys() == {"copy", "read"}
    experts = MixtralConfig(**SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=2)
    assert measure_limit(AutoModelForCausalLM.from_config(experts)) is None
