"""The physical limit: its arithmetic against sizes and counted operations, and the measured device."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig

from infer.speed import limit as device
from infer.speed.limit import Limit, Needs, measure_limit, seconds_of
from tests.gpu.shapes import TINY, random_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
SMALL |= {"intermediate_size": 48, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**TINY)
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64)
MISTRAL = MistralConfig(**SMALL, sliding_window=64, tie_word_embeddings=True)


def needs(config) -> Needs:
    return Needs.of(AutoModelForCausalLM.from_config(config))


def test_what_a_plain_step_reads() -> None:
    """By hand: two layers of width 32, 4 heads of 8, 2 key-value heads, a head of 199 rows; of the row that is
    fed an entry of the embedding, and keys and values that are written. A tied head is read, positions are not.
    """
    tiny = Needs.of(random_model(TINY, dtype=torch.bfloat16, device="cpu"))
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32 + 2 * 32
    cache = 2 * 2 * 2 * 8
    assert tiny.weight_bytes == 2 * (2 * layer + 32 + 199 * 32)
    assert tiny.bytes(1, 100) == 2 * (2 * layer + 32 + 199 * 32 + 100 * cache + cache + 32)
    assert tiny.bytes(3, 100) == tiny.bytes(1, 100) + 2 * 2 * (cache + 32)
    lm = AutoModelForCausalLM.from_config(GPT2)
    positions = lm.transformer.wpe.weight.nbytes
    assert Needs.of(lm).weight_bytes == sum(weight.nbytes for weight in lm.parameters()) - positions


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("config", [LlamaConfig(**TINY), GPT2, MISTRAL], ids=["llama", "gpt2", "mistral"])
def test_operations_are_those_of_the_librarys_forward(config, rows: int) -> None:
    lm = AutoModelForCausalLM.from_config(config).eval()
    lm.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache = lm(torch.ones(1, 20, dtype=torch.long), use_cache=True).past_key_values
        before = counter.get_total_flops()
        lm(torch.ones(1, rows, dtype=torch.long), past_key_values=cache)
    assert Needs.of(lm).flops(rows, 20) == pytest.approx(counter.get_total_flops() - before, rel=0.01)


def test_a_window_bounds_what_is_read() -> None:
    wide, narrow = (needs(MistralConfig(**SMALL, sliding_window=window)) for window in (None, 16))
    assert narrow.bytes(1, 16) == wide.bytes(1, 16) and narrow.bytes(1, 90) == wide.bytes(1, 16)
    assert narrow.flops(1, 90) == wide.flops(1, 15)


def test_a_forward_is_bound_by_memory_and_then_by_operations() -> None:
    need = Needs(1000, row_bytes=10, weight_flops=500, cache_bytes=2, pair_flops=4, windows=(None, None))
    limit = Limit("float32", need, copy=90.0, read=100.0, flops=100.0)
    assert limit.seconds(1, 10) == (1000 + 10 + 10 * 2 * 2) / 100
    assert limit.seconds(4, 10) == 4 * (500 + 4 * 2 * 14) / 100
    assert limit.describe(10)["forward_ms"][0] == [1, 1e3 * limit.seconds(1, 10)]


def test_a_call_is_timed_among_its_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take 2 ms, most of them longer for other work; the clock's own 0.1 ms counts for little."""
    now, calls = [0.0], [0]

    def advance(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    def task() -> None:
        advance(0.002 if 20 < calls[0] < 30 else 0.005)
        calls[0] += 1

    monkeypatch.setattr(device, "clock", lambda: advance(1e-4))
    assert seconds_of(task) == pytest.approx(0.002, rel=0.05)


def test_a_mixture_of_experts_has_no_known_limit() -> None:
    experts = MixtralConfig(**SMALL, num_local_experts=2)
    assert measure_limit(AutoModelForCausalLM.from_config(experts)) is None
