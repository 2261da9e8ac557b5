"""Test decoding on a GPU: tokens, near-ties, tensor parallelism, the cost of rows.

In float32 the tokens of every decoder must equal plain decoding's. In bfloat16 and float16,
forwards of different widths may round near-ties differently. There every token must be the
likeliest token of one causal forward over the whole text, or nearly tie with it.
"""

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.runs.files import write_json
from infer import DecodeConfig, Model
from infer import load as load_model
from infer.bench.roofline import measure_roofline
from infer.engine.noise import gumbel
from infer.engine.pick import Logits
from infer.engine.sampling import Sampling
from tests.drills.lossless import MORE_DECODERS, SAMPLINGS, SHAPES, texts_of
from tests.gpu.shapes import CODELLAMA_7B, DEVICE, LIVELY, RANKS, random_model
from tests.infer.library import number_words

# Largest distance of a near-tie below the likeliest token, as a share of the logits' range.
NEAR = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.003}
DECODERS = {"plain": DecodeConfig("plain"), **SHAPES, **MORE_DECODERS}
GREEDY = SAMPLINGS["greedy"]
load = partial(load_model, device=DEVICE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model directory with the shape LIVELY and a tokenizer of numbers as words."""
    path = tmp_path_factory.mktemp("model")
    random_model(LIVELY, dtype=torch.float32, device="cpu").save_pretrained(path)
    words = number_words(LIVELY["vocab_size"])
    words.save(str(path / "tokenizer.json"))
    adaptive = {"adaptive_ids": [490], "L": 3}
    write_json(path / "adaptive.json", adaptive)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder, "float32")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [
        rng.choices(range(LIVELY["vocab_size"]), k=rng.randint(1, 60)) for _ in range(8)
    ]


def decoded(
    model: Model,
    prompts: list[list[int]],
    decoder: str = "plain",
    sampling: Sampling = GREEDY,
    *,
    batch: int = 1,
) -> list[list[int]]:
    decode = replace(DECODERS[decoder], max_new_tokens=48, **vars(sampling))
    return texts_of(model, prompts, decode, batch=batch)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_tokens_equal_plain_decodings(
    model: Model,
    prompts: list[list[int]],
    decoder: str,
    sampling: Sampling,
    batch: int,
) -> None:
    texts = decoded(model, prompts, decoder, sampling, batch=batch)
    assert texts == decoded(model, prompts, sampling=sampling)


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU's forward is compiled")
def test_a_compiled_forward_gives_the_same_tokens(
    model: Model, prompts: list[list[int]], folder: Path
) -> None:
    compiled = load(folder, "float32", compile=True)
    texts = decoded(compiled, prompts, "sdsat, paper's tree")
    assert texts == decoded(model, prompts)


@pytest.mark.parametrize(
    "decoder", ["plain", "two forwards, k=5", "sdsat, paper's tree"]
)
@pytest.mark.parametrize("dtype", NEAR)
def test_different_tokens_nearly_tie(
    folder: Path, prompts: list[list[int]], dtype: str, decoder: str, show: Any
) -> None:
    """Compare float32 with the CPU, and 16-bit dtypes with a causal forward on the same device."""
    model = load(folder, dtype)
    judge = load(folder, dtype, device="cpu") if dtype == "float32" else model
    worst = max(
        float(distances(judge.lm, prompt, text).max())
        for prompt, text in zip(prompts, decoded(model, prompts, decoder))
    )
    show(worst=worst)
    assert worst <= NEAR[dtype]


def distances(lm: Any, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Return how far the logits of n tokens are below the largest ones in one causal forward.

    The (n,) distances are shares of the range of logits.
    """
    head = lm.get_output_embeddings()
    ids = torch.tensor([[*prompt, *text]], device=lm.device)
    with torch.no_grad():
        hidden = lm.get_decoder()(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        logits = Logits(head, hidden, head(hidden)).whole().double()
    highest = logits.amax(1)
    below = highest - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return below / (highest - logits.amin(1))


def test_noise_is_the_same_on_the_device() -> None:
    keys = torch.arange(50)
    ids = torch.arange(500).expand(50, -1)
    noise = gumbel(keys.to(DEVICE), keys.to(DEVICE), ids.to(DEVICE))
    torch.testing.assert_close(noise.cpu(), gumbel(keys, keys, ids))


def test_a_model_divided_over_all_devices_gives_the_same_text(folder: Path) -> None:
    """Test tensor parallelism over all GPUs; the number of heads is divisible by 1, 2, 4 and 8."""
    if RANKS < 2 or LIVELY["num_key_value_heads"] % RANKS:
        pytest.skip(f"{RANKS} devices")
    arguments = ["-m", "infer", f"model={folder}", "prompt=5 17 3 88 41"]
    arguments += ["dtype=float32", "decode=hybrid", "decode.max_new_tokens=40"]
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    torchrun.append(f"--nproc-per-node={RANKS}")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if DEVICE == "cpu" else {}
    printed = [
        subprocess.run(
            [sys.executable, *launcher, *arguments],
            env=os.environ | hidden,
            capture_output=True,
            check=True,
        ).stdout
        for launcher in (torchrun, [])
    ]
    assert printed[0] == printed[1] != b""


def test_the_cost_of_rows(show: Any) -> None:
    """Measure forwards of q rows and their lower bound, for CodeLlama-7B's shape in bfloat16."""
    shape = CODELLAMA_7B if DEVICE == "cuda" else LIVELY
    figures = measure_roofline(random_model(shape, dtype=torch.bfloat16, device=DEVICE))
    show(**figures)
    assert min(figures["ms"]) > 0
