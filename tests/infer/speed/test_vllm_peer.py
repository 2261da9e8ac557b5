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

Args = list[dict[str, Any]]
PROMPT = TokenPrompt("a", (1, 2), frozenset([5]), "", "")
ONE, SAMPLED = Adaptive((7,), 3), Sampling(0.2, 0, 0.95)


def load(adaptive: Adaptive | None = ONE) -> Any:
    return load_engines("DIR", adaptive, 3, dtype="bfloat16", capacity=64)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Args:
    """A stand-in with vLLM's names, which notes what it is asked."""
    noted = list[dict[str, Any]]()
    counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)

    class LLM:
        metrics = SimpleNamespace(first_token_latency=0.5)

        def __init__(self, **settings: Any) -> None:
            noted.append(settings)
            self.drafts = settings["speculative_config"] is not None

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            noted.append({"prompts": prompts, **vars(params)})
            for name, more in zip(counts, (2, 8, 4) if self.drafts else ()):
                counts[name] += more
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(7))], metrics=self.metrics)]

        def get_metrics(self) -> list[Any]:
            return [SimpleNamespace(name=f"vllm:spec_decode_num_{key}", value=n) for key, n in counts.items()]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_peer, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_peer, "clock", lambda: 0.0)
    return noted


def test_the_model_drafts_for_itself_in_parallel(requested: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = load()
    plain, drafting = (item for item in requested if "model" in item)
    assert len(requested) == 4  # each has been tried
    assert plain["speculative_config"] is None and not plain["enable_prefix_caching"]
    drafts = {"method": "draft_model", "model": "DIR", "num_speculative_tokens": 4, "parallel_drafting": True}
    assert drafting["speculative_config"] == drafts
    assert drafting["gpu_memory_utilization"] == 2 * plain["gpu_memory_utilization"]  # the weights twice
    decoders, reason = engines.decoders(sampling=SAMPLED, max_new_tokens=7)
    assert reason is None
    runs = {k: decoder(PROMPT) for k, decoder in decoders.items()}
    assert requested[-1]["prompts"] == [{"prompt_token_ids": [1, 2]}] and requested[-1]["stop_token_ids"] == [5]
    assert (requested[-1]["temperature"], requested[-1]["top_k"], requested[-1]["top_p"]) == (0.2, -1, 0.95)
    assert (runs[0].forwards, runs[0].rows, runs[0].drafted) == (7, 7, 0)
    # Two steps: each verifies 1 + 4 rows, then drafts by those, the last token and three masks.
    assert (runs[3].forwards, runs[3].rows, runs[3].drafted, runs[3].accepted) == (5, 1 + 2 * (5 + 9), 8, 4)
    assert runs[3].tokens == list(range(7)) and runs[3].first_seconds == 0.5
    # An engine without metrics ended the run of all decoders.
    monkeypatch.setattr(sys.modules["vllm"].LLM, "metrics", None)
    assert decoders[0](PROMPT).first_seconds == 0


def test_on_a_cpu_nothing_is_sampled_with_drafts(requested: Args, monkeypatch) -> None:
    """Its texts at temperature 1 were noise: vLLM divides the logits by memory that it has not written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    greedy, reason = load().decoders(sampling=Sampling(), max_new_tokens=7)
    assert (list(greedy), reason) == ([0, 3], None)
    sampled, reason = load().decoders(sampling=SAMPLED, max_new_tokens=7)
    assert list(sampled) == [0] and "it drafts greedily on a CPU" in str(reason)


def test_without_vllm_or_the_right_tokens_there_is_no_peer(requested: Args, monkeypatch) -> None:
    assert load(None) == "it needs a model with adaptive tokens, got none"
    two = "it needs one adaptive token in the model's own weights, got 2 of them"
    assert missing(Adaptive((7, 8), 2)) == two
    assert "an adapter that acts on probes alone" in str(missing(Adaptive((7,), 2, gated=True)))
    monkeypatch.setattr(vllm_peer, "find_spec", lambda name: None)
    assert load() == "vLLM is not installed" and not requested


def test_an_engine_that_cannot_load_is_reported(requested: Args, monkeypatch) -> None:
    """Weights that fit once and not twice cost vLLM's plain row too, after minutes of loading."""
    real = sys.modules["vllm"].LLM

    def refuse(*, speculative_config: Any, **settings: Any) -> Any:
        if speculative_config or "plain" in refused:
            raise ValueError("no room for the cache\nmore")
        return real(speculative_config=None, **settings)

    message = "vLLM must load the model and decode a prompt, got"
    monkeypatch.setattr(sys.modules["vllm"], "LLM", refuse)
    refused = {"drafting"}
    engines = load()
    assert engines.undrafted == f"{message} ValueError: no room for the cache"
    for sampling in (Sampling(), SAMPLED):
        decoders, reason = engines.decoders(sampling=sampling, max_new_tokens=7)
        assert (list(decoders), reason) == ([0], None)
    refused = {"drafting", "plain"}
    assert load() == engines.undrafted
    monkeypatch.delattr(sys.modules["vllm"], "SamplingParams")
    monkeypatch.setattr(sys.modules["vllm"], "LLM", real)
    assert str(load()).startswith(f"{message} ImportError: cannot import name 'SamplingParams'")
