"""vLLM serves an exported kind of directory with parallel drafting; skipped where vLLM is not installed.

In float32 its tokens are plain decoding's, and its drafts those of SDSAT's drafting forward, one by one. On a
CPU two engines take about two minutes to start.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from infer import DecodeConfig, generate, load
from infer.benchmarks.prompts import TokenPrompt
from infer.engine.sampling import Sampling
from infer.models.checkpoint import ModelDirectory
from infer.speed.peers import UNSAMPLED, Engines, load_engines
from tests.infer.conftest import ROWS
from tests.infer.served import drafted

K, NEW = 4, 24

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def directory(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the smallest heads that vLLM's kernels take. A few tokens make up most of the text."""
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    mask = ModelDirectory(model_dir).need_adaptive().ids[0]
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pard_token": mask, "ptd_token_id": mask}
    positions = {"max_position_embeddings": 256, "initializer_range": 0.2}
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=ROWS, **sizes, **positions, **ids))
    with torch.no_grad():
        lm.lm_head.weight[torch.arange(ROWS) % 50 > 0] *= 0.2
    lm.save_pretrained(folder)
    return folder


def test_parallel_drafting_gives_the_models_own_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, instead of a share of the machine's memory
    adaptive = ModelDirectory(directory).need_adaptive()
    engines = load_engines(str(directory), adaptive, K - 1, dtype="float32", capacity=128)
    assert isinstance(engines, Engines), engines
    decoders, reason = engines.decoders(sampling=Sampling(), max_new_tokens=NEW)
    assert reason is None
    model = load(directory, "float32", "cpu")
    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ends = {json.loads((directory / "config.json").read_text())["eos_token_id"]}
    more = 0
    for n in range(8):
        prompt = TokenPrompt(str(n), tuple(range(20 + n, 25 + 3 * n)), frozenset(), "", "")
        runs = {k: decoder(prompt) for k, decoder in decoders.items()}
        expected = drafted(lm, prompt.ids, mask=adaptive.ids[0], K=K, new=NEW, ends=ends)
        steps = generate(model, prompt.ids, DecodeConfig(method="plain", max_new_tokens=NEW))
        plain = [token for step in steps for token in step.tokens]
        assert runs[0].tokens == runs[K - 1].tokens == expected.tokens == plain
        assert (runs[K - 1].forwards, runs[K - 1].accepted) == (1 + 2 * expected.steps, expected.accepted)
        more += expected.accepted - expected.steps
    assert more > 0  # behind the model's own next token, by masks
    if not torch.cuda.is_available():
        sampled, reason = engines.decoders(sampling=Sampling(1.0, 0, 0.95), max_new_tokens=NEW)
        assert (list(sampled), reason) == ([0], UNSAMPLED)
