"""vLLM as a peer, as far as it goes without vLLM: what it is asked, and how its answers are counted.

What vLLM itself makes of it is test_vllm_served.py's.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from infer.benchmarks.prompts import TokenPrompt
from infer.engine.sampling import Sampling
from infer.models.checkpoint import Adaptive
from infer.speed import peers as vllm_peer
from infer.speed.peers import load_engines, missing

Asked = list[dict[str, Any]]
ONE = Adaptive((7,), 3)


def load(adaptive: Adaptive | None = ONE) -> Any:
    return load_engines("DIR", adaptive, 3, dtype="bfloat16", capacity=64)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in with vLLM's names, which notes what it is asked."""
    noted = list[dict[str, Any]]()
    counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)

    class LLM:
        def __init__(self, **settings: Any) -> None:
            noted.append(settings)
            self.drafts = settings["speculative_config"] is not None

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            noted.append({"prompts": prompts, **vars(params)})
            if self.drafts:
                for name, more in zip(counts, (2, 8, 4)):
                    counts[name] += more
            metrics = SimpleNamespace(first_token_latency=0.5)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(7))], metrics=metrics)]

        def get_metrics(self) -> list[Any]:
            return [SimpleNamespace(name=f"vllm:spec_decode_num_{key}", value=n) for key, n in counts.items()]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_peer, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_peer, "clock", lambda: 0.0)
    return noted


def test_the_model_drafts_for_itself_in_parallel(requested: Asked) -> None:
    engines = load()
    plain, drafting = (item for item in requested if "model" in item)
    assert len(requested) == 4  # each has been tried
    assert plain["speculative_config"] is None and not plain["enable_prefix_caching"]
    drafts = {"method": "draft_model", "model": "DIR", "num_speculative_tokens": 4, "parallel_drafting": True}
    assert drafting["speculative_config"] == drafts
    decoders, reason = engines.decoders(sampling=Sampling(0.2, 0, 0.95), max_new_tokens=7)
    assert reason is None
    prompt = TokenPrompt("a", (1, 2), frozenset([5]), "", "")
    runs = {k: decoder(prompt) for k, decoder in decoders.items()}
    assert requested[-1]["prompts"] == [{"prompt_token_ids": [1, 2]}] and requested[-1]["stop_token_ids"] == [5]
    assert (requested[-1]["temperature"], requested[-1]["top_k"], requested[-1]["top_p"]) == (0.2, -1, 0.95)
    assert (runs[0].forwards, runs[0].rows, runs[0].drafted) == (7, 7, 0)
    # Two steps: each verifies 1 + 4 rows, then drafts by those, the last token and three masks.
    assert (runs[3].forwards, runs[3].rows, runs[3].drafted, runs[3].accepted) == (5, 1 + 2 * (5 + 9), 8, 4)
    assert runs[3].tokens == list(range(7)) and runs[3].first_seconds == 0.5


def test_on_a_cpu_nothing_is_sampled_with_drafts(requested: Asked, monkeypatch) -> None:
    """Its texts at temperature 1 were noise: vLLM divides the logits by memory that it has not written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engines = load()
    greedy, reason = engines.decoders(sampling=Sampling(), max_new_tokens=7)
    assert (list(greedy), reason) == ([0, 3], None)
    sampled, reason = engines.decoders(sampling=Sampling(0.2, 0, 0.95), max_new_tokens=7)
    assert list(sampled) == [0] and "it drafts greedily on a CPU" in str(reason)


def test_without_vllm_or_the_right_tokens_there_is_no_peer(requested: Asked, monkeypatch) -> None:
    assert load(None) == "it needs a model with adaptive tokens, got none"
    message = "it needs one adaptive token in the model's own weights, got 2 of them"
    assert missing(Adaptive((7, 8), 2)) == message
    assert "an adapter that acts on probes alone" in str(missing(Adaptive((7,), 2, gated=True)))
    monkeypatch.setattr(vllm_peer, "find_spec", lambda name: None)
    assert load() == "vLLM is not installed"
    assert not requested


def test_an_engine_that_cannot_load_is_reported(requested: Asked, monkeypatch) -> None:
    def refuse(**settings: Any) -> None:
        raise ValueError("no room for the cache\nmore")

    message = "vLLM must load the model and decode a prompt, got"
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["vllm"], "LLM", refuse)
        assert load() == f"{message} ValueError: no room for the cache"
    monkeypatch.delattr(sys.modules["vllm"], "SamplingParams")
    assert str(load()).startswith(f"{message} ImportError: cannot import name 'SamplingParams'")


def test_plain_decoding_is_kept_where_there_is_no_room_to_draft(requested: Asked, monkeypatch) -> None:
    """Weights that fit once and not twice cost vLLM's plain row too, after minutes of loading. And both engines
    had the same share of the memory, though one of them holds the weights twice.
    """
    real = sys.modules["vllm"].LLM

    def twice(**settings: Any) -> Any:
        if settings["speculative_config"]:
            raise ValueError("no room for the cache")
        return real(**settings)

    load()
    plain, drafting = (item["gpu_memory_utilization"] for item in requested if "model" in item)
    assert drafting == 2 * plain
    monkeypatch.setattr(sys.modules["vllm"], "LLM", twice)
    engines = load()
    assert "no room for the cache" in str(engines.undrafted)
    for sampling in (Sampling(), Sampling(0.2)):
        decoders, reason = engines.decoders(sampling=sampling, max_new_tokens=7)
        assert (list(decoders), reason) == ([0], None)


def test_an_engine_without_metrics_has_no_time_of_the_first_token(requested: Asked, monkeypatch) -> None:
    """It ended the run of all decoders."""
    real = sys.modules["vllm"].LLM.generate

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        (output,) = real(self, *args, **kwargs)
        return [SimpleNamespace(outputs=output.outputs, metrics=None)]

    monkeypatch.setattr(sys.modules["vllm"].LLM, "generate", without)
    engines = load()
    decoder = engines.decoders(sampling=Sampling(), max_new_tokens=7)[0][0]
    assert decoder(TokenPrompt("a", (1, 2), frozenset(), "", "")).first_seconds == 0
