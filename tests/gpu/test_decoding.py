"""Decoding on a GPU: tokens, near-ties, tensor parallelism, the cost of rows.

In float32 the tokens of every decoder must be those of plain decoding. In bfloat16 and float16, where two
forwards of different width may round a near-tie differently, every token is held against one causal forward of
the library over the whole text: it must be the pick there, or nearly tie with it.
"""

import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.output import Request
from infer.engine.pick import Logits, gumbel
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Drafters, Limits, decode
from infer.ngrams import Ngrams
from infer.trees.tree import Tree
from tests.gpu.shapes import CODELLAMA_7B, DEVICE, LIVELY, RANKS, TINY, random_model

NEW = 48  # tokens of every text
NEAR = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.02,
    torch.float16: 0.003,
}  # below the pick, at most
ADAPTIVE = 490  # as good as any other id of a random model
TEXT = Ngrams(None, LIVELY["vocab_size"])
DECODERS: dict[str, Callable[[], Drafter]] = {
    "plain": Drafter,
    "prompt lookup": partial(AdaptiveDrafter, (), FixedPolicy(5), TEXT),
    "two-forward": partial(AdaptiveDrafter, [ADAPTIVE], FixedPolicy(5)),
    "one-forward": partial(AdaptiveDrafter, [ADAPTIVE], FixedPolicy(5, "all")),
    "tree": partial(
        AdaptiveDrafter, [ADAPTIVE], FixedPolicy(3, 4, nodes=12, width=4), TEXT
    ),
}
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(1.0),
    "top_k, top_p": Sampling(0.8, top_k=10, top_p=0.95),
}
ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT, ROUNDS, WARM_UPS = 1024, 25, 3
Texts = list[list[int]]


@cache
def lively(dtype: torch.dtype, device: str = DEVICE) -> PreTrainedModel:
    lm: Any = random_model(LIVELY, dtype=torch.float32, device="cpu")
    return copy.deepcopy(lm).to(device=device, dtype=dtype)


def requests(
    n: int = 8, processors: LogitsProcessorList | None = None
) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 60, (n,), generator=generator).tolist()
    prompts = [
        torch.randint(0, LIVELY["vocab_size"], (n,), generator=generator).tolist()
        for n in lengths
    ]
    return [Request(prompt, seed, processors) for seed, prompt in enumerate(prompts)]


def texts_of(
    lm: PreTrainedModel,
    new: Callable[[], Drafter],
    asked: Sequence[Request],
    sampling: Sampling = GREEDY,
    *,
    batch: int = 1,
    compile: bool = False,
) -> Texts:
    """Return the new tokens of every request, so many side by side."""
    capacity = max(len(request.prompt) for request in asked) + NEW
    runner = Runner(
        lm,
        capacity=capacity,
        max_rows=new().max_rows,
        batch=batch,
        static=True,
        compile=compile,
    )
    texts: Texts = [[] for _ in asked]
    for first in range(0, len(asked), batch):
        for steps in decode(
            runner, asked[first : first + batch], Drafters(new), Limits(NEW), sampling
        ):
            for step in steps:
                texts[first + step.sequence] += step.tokens
    return texts


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_tokens_are_those_of_plain_decoding(
    decoder: str, sampling: str, batch: int
) -> None:
    lm = lively(torch.float32)
    plain = texts_of(lm, Drafter, requests(), SAMPLINGS[sampling])
    assert (
        texts_of(lm, DECODERS[decoder], requests(), SAMPLINGS[sampling], batch=batch)
        == plain
    )


def test_processors_see_the_text_before_them() -> None:
    lm = lively(torch.float32)
    penalised = requests(
        processors=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    )
    assert texts_of(lm, DECODERS["tree"], penalised, batch=3) == texts_of(
        lm, Drafter, penalised
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU's forward is compiled")
def test_a_compiled_forward_gives_the_same_tokens() -> None:
    lm = lively(torch.float32)
    compiled = texts_of(lm, DECODERS["tree"], requests(), compile=True)
    assert compiled == texts_of(lm, Drafter, requests())


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("decoder", ["plain", "two-forward", "tree"])
@pytest.mark.parametrize("dtype", NEAR)
def test_other_tokens_nearly_tie(
    dtype: torch.dtype, decoder: str, sampling: str, show: Any
) -> None:
    """Float32 is held against the CPU, narrow types against the library's forward on the same device."""
    lm = lively(dtype)
    judge = lively(torch.float32, "cpu") if dtype == torch.float32 else lm
    flips, worst = 0, 0.0
    for request, text in zip(
        requests(),
        texts_of(lm, DECODERS[decoder], requests(), SAMPLINGS[sampling]),
        strict=True,
    ):
        below, extent = distance_from_the_pick(
            judge, request, text, SAMPLINGS[sampling]
        )
        flips += int((below > 0).sum())
        worst = max(worst, float((below / extent).max()))
    show(flips=flips, worst=worst)
    assert worst <= NEAR[dtype]


def distance_from_the_pick(
    lm: PreTrainedModel, request: Request, text: Sequence[int], sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far (n,) each token lies below the pick of one causal forward, and the range of its logits."""
    head: Any = lm.get_output_embeddings()
    n = len(request.prompt)
    ids = torch.tensor([[*request.prompt, *text]], device=lm.device)
    with torch.no_grad():
        hidden = lm.get_decoder()(ids).last_hidden_state[0, n - 1 : -1]
        logits = Logits(head, hidden, head(hidden)).whole().double()
    scores = logits
    if sampling.temperature:
        places = torch.arange(n, n + len(text), device=lm.device)
        every = torch.arange(logits.shape[1], device=lm.device).expand_as(logits)
        scores = logits / sampling.temperature + gumbel(
            torch.full_like(places, request.seed), places, every
        )
    below = scores.amax(1) - scores.gather(1, ids[0, n:, None])[:, 0]
    return below, logits.amax(1) - logits.amin(1)


def test_a_model_divided_over_all_devices_gives_the_same_text(tmp_path: Path) -> None:
    """Tensor parallel over as many GPUs as there are; its heads divide by 1, 2, 4 and 8."""
    if RANKS < 2 or LIVELY["num_key_value_heads"] % RANKS:
        pytest.skip(f"{RANKS} devices")
    lively(torch.float32, "cpu").save_pretrained(tmp_path)
    words = Tokenizer(
        WordLevel({str(id): id for id in range(LIVELY["vocab_size"])}, unk_token="0")
    )
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "adaptive.json").write_text(
        json.dumps({"adaptive_ids": [ADAPTIVE], "L": 3})
    )
    arguments = [
        "-m",
        "infer",
        f"model={tmp_path}",
        "prompt=5 17 3 88 41",
        "dtype=float32",
    ]
    arguments += ["decode=hybrid", "decode.max_new_tokens=40"]
    environment = dict(os.environ) | (
        {"CUDA_VISIBLE_DEVICES": ""} if DEVICE == "cpu" else {}
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
    ]
    printed = [
        subprocess.run(
            [*command, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for command in (torchrun, [sys.executable])
    ]
    assert printed[0].stdout == printed[1].stdout != ""


def test_the_cost_of_rows(show: Any) -> None:
    """L(q) / L(1): what a forward of q rows costs, of CodeLlama-7B's shape in bfloat16."""
    shape = CODELLAMA_7B if DEVICE == "cuda" else TINY
    lm = random_model(shape, dtype=torch.bfloat16, device=DEVICE)
    runner = Runner(lm, capacity=CONTEXT, max_rows=ROWS[-1], static=True)
    generator = torch.Generator().manual_seed(2)
    runner.prefill(
        [
            torch.randint(
                3, shape["vocab_size"], (CONTEXT - ROWS[-1],), generator=generator
            ).tolist()
        ]
    )
    times: dict[int, list[float]] = {q: [] for q in ROWS}
    for turn in range(WARM_UPS + ROUNDS):
        for q in ROWS:
            began = time.perf_counter()
            tree = Tree.chain(1, [1] * (q - 1))
            tree.walk(
                runner.forward([tree], [Request([1])], GREEDY).chooser(0, ())
            )  # waits for the device
            if turn >= WARM_UPS:
                times[q].append(time.perf_counter() - began)
    medians = {q: statistics.median(values) for q, values in times.items()}
    weights = sum(p.numel() * p.element_size() for p in lm.parameters())
    show(
        ms=round(1e3 * medians[1], 3),
        ratios={q: round(value / medians[1], 3) for q, value in medians.items()},
        gigabytes_per_second=round(weights / medians[1] / 1e9, 1),
    )
    assert medians[1] > 0
