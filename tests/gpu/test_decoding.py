"""Decoding on a GPU: tokens, near-ties, tensor parallelism, the cost of rows.

In float32 the tokens of every decoder must be those of plain decoding. In bfloat16 and float16
forwards of different widths may round near-ties differently: there every token must be the pick
of one causal forward over the whole text, or nearly tie with it.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from infer import DecodeConfig, Model, generate
from infer import load as load_model
from infer.bench.roofline import measure_roofline
from infer.engine.pick import Logits, gumbel
from tests.gpu.shapes import CODELLAMA_7B, DEVICE, LIVELY, RANKS, TINY, random_model

NEAR = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.003}  # below the pick, at most
PLAIN = DecodeConfig("plain", max_new_tokens=48)
DECODERS = {
    "plain": PLAIN,
    "prompt lookup": replace(PLAIN, method="prompt_lookup", k=5),
    "two forwards": replace(PLAIN, method="hybrid", k=5, probes="root"),
    "one forward": replace(PLAIN, method="hybrid", k=5, probes="all"),
    "two sites": replace(PLAIN, method="hybrid", k=3, probes="2"),
    "tree": replace(PLAIN, method="sdsat", k=5, tree="paper"),
    "measured": replace(PLAIN, method="hybrid"),
}
SAMPLINGS = {
    "greedy": partial(replace),
    "sampled": partial(replace, temperature=1.0),
    "top_k, top_p": partial(replace, temperature=0.8, top_k=10, top_p=0.95),
}
load = partial(load_model, device=DEVICE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose tokens depend on all before them; every word is a number."""
    path = tmp_path_factory.mktemp("model")
    random_model(LIVELY, dtype=torch.float32, device="cpu").save_pretrained(path)
    vocabulary = {str(id): id for id in range(LIVELY["vocab_size"])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    adaptive = {"adaptive_ids": [490], "L": 3}
    (path / "adaptive.json").write_text(json.dumps(adaptive))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder, "float32")


def prompts_of(count: int = 8) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    vocabulary = LIVELY["vocab_size"]
    return [
        torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        for length in lengths
    ]


def texts_of(model: Model, decode: DecodeConfig, *, batch: int = 1) -> list[list[int]]:
    """Return the new tokens of every prompt, `batch` prompts side by side."""
    prompts = prompts_of()
    texts: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        seeds = list(range(start, start + len(part)))
        for step in generate(model, part, decode, seeds=seeds):
            texts[start + step.sequence] += step.tokens
    return texts


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_tokens_are_those_of_plain_decoding(
    model: Model, decoder: str, sampling: str, batch: int
) -> None:
    sampled = SAMPLINGS[sampling]
    texts = texts_of(model, sampled(DECODERS[decoder]), batch=batch)
    assert texts == texts_of(model, sampled(PLAIN))


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU's forward is compiled")
def test_a_compiled_forward_gives_the_same_tokens(model: Model, folder: Path) -> None:
    compiled = texts_of(load(folder, "float32", compile=True), DECODERS["tree"])
    assert compiled == texts_of(model, PLAIN)


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("decoder", ["plain", "two forwards", "tree"])
@pytest.mark.parametrize("dtype", NEAR)
def test_other_tokens_nearly_tie(
    folder: Path, dtype: str, decoder: str, sampling: str, show: Any
) -> None:
    """Float32 is compared with the CPU, narrow types with the library on the same device."""
    model = load(folder, dtype)
    judge = load(folder, dtype, device="cpu") if dtype == "float32" else model
    decode = SAMPLINGS[sampling](DECODERS[decoder])
    flips = 0
    worst = 0.0
    for seed, (prompt, text) in enumerate(zip(prompts_of(), texts_of(model, decode))):
        below, extent = distance_from_the_pick(
            judge.lm, prompt, text, seed, decode.temperature
        )
        flips += int((below > 0).sum())
        worst = max(worst, float((below / extent).max()))
    show(flips=flips, worst=worst)
    assert worst <= NEAR[dtype]


def distance_from_the_pick(
    lm: Any, prompt: list[int], text: list[int], seed: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n,) distances of the tokens below the pick, and ranges of the logits.

    The pick is that of one causal forward over the text.
    """
    head = lm.get_output_embeddings()
    n = len(prompt)
    ids = torch.tensor([[*prompt, *text]], device=lm.device)
    with torch.no_grad():
        hidden = lm.get_decoder()(ids).last_hidden_state[0, n - 1 : -1]
        logits = Logits(head, hidden, head(hidden)).whole().double()
    scores = logits
    if temperature:
        places = torch.arange(n, n + len(text), device=lm.device)
        every = torch.arange(logits.shape[1], device=lm.device).expand_as(logits)
        noise = gumbel(torch.full_like(places, seed), places, every)
        scores = logits / temperature + noise
    below = scores.amax(1) - scores.gather(1, ids[0, n:, None])[:, 0]
    return below, logits.amax(1) - logits.amin(1)


def test_a_model_divided_over_all_devices_gives_the_same_text(folder: Path) -> None:
    """Tensor parallelism over all GPUs; the heads divide by 1, 2, 4 and 8."""
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
    """A forward of q rows and its lower bound, of CodeLlama-7B's shape in bfloat16."""
    shape = CODELLAMA_7B if DEVICE == "cuda" else TINY
    figures = measure_roofline(random_model(shape, dtype=torch.bfloat16, device=DEVICE))
    show(**figures)
    assert min(figures["ms"]) > 0
