"""Decoding on a GPU: tokens, near-ties, tensor parallelism, the cost of rows.

In float32 the tokens of every decoder must be those of plain decoding. In bfloat16 and float16
forwards of different widths may round near-ties differently: there every token must be the pick
of one causal forward over the whole text, or nearly tie with it.
"""

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel

from infer.bench.roofline import measure_roofline
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.output import Request
from infer.engine.pick import Logits, gumbel
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.engine.static import CompileWarning
from infer.loop import Drafter, Drafters, Limits, decode
from infer.ngrams import Ngrams
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
Texts = list[list[int]]


@cache
def lively(dtype: torch.dtype, device: str = DEVICE) -> PreTrainedModel:
    lm: Any = random_model(LIVELY, dtype=torch.float32, device="cpu")
    return copy.deepcopy(lm).to(device=device, dtype=dtype)


def requests(n: int = 8) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 60, (n,), generator=generator).tolist()
    prompts = [
        torch.randint(0, LIVELY["vocab_size"], (n,), generator=generator).tolist()
        for n in lengths
    ]
    return [Request(prompt, seed) for seed, prompt in enumerate(prompts)]


def texts_of(
    lm: PreTrainedModel,
    new: Callable[[], Drafter],
    all_requests: Sequence[Request],
    sampling: Sampling = GREEDY,
    *,
    batch: int = 1,
    compile: bool = False,
) -> Texts:
    """Return the new tokens of every request, `batch` requests side by side."""
    capacity = max(len(request.prompt) for request in all_requests) + NEW
    runner = Runner(
        lm,
        capacity=capacity,
        max_rows=new().max_rows,
        batch=batch,
        static=True,
        compile=compile,
    )
    texts: Texts = [[] for _ in all_requests]
    for first in range(0, len(all_requests), batch):
        for steps in decode(
            runner,
            all_requests[first : first + batch],
            Drafters(new),
            Limits(NEW),
            sampling,
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


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU's forward is compiled")
def test_a_compiled_forward_gives_the_same_tokens() -> None:
    lm = lively(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompileWarning)
        compiled = texts_of(lm, DECODERS["tree"], requests(), compile=True)
    assert compiled == texts_of(lm, Drafter, requests())


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("decoder", ["plain", "two-forward", "tree"])
@pytest.mark.parametrize("dtype", NEAR)
def test_other_tokens_nearly_tie(
    dtype: torch.dtype, decoder: str, sampling: str, show: Any
) -> None:
    """Float32 is compared with the CPU, narrow types with the library on the same device."""
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
    """Return (n,) distances of the tokens below the pick, and ranges of the logits.

    The pick is that of one causal forward over the text.
    """
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
    """Tensor parallelism over all GPUs; the heads divide by 1, 2, 4 and 8."""
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
    arguments = ["-m", "infer", f"model={tmp_path}", "prompt=5 17 3 88 41"]
    arguments += ["dtype=float32", "decode=hybrid", "decode.max_new_tokens=40"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if DEVICE == "cpu" else {}
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    printed = [
        subprocess.run(
            [sys.executable, *launcher, *arguments],
            env=os.environ | hidden,
            capture_output=True,
            check=True,
        ).stdout
        for launcher in (["-m", *torchrun], [])
    ]
    assert printed[0] == printed[1] != b""


def test_the_cost_of_rows(show: Any) -> None:
    """A forward of q rows and its lower bound, of CodeLlama-7B's shape in bfloat16."""
    shape = CODELLAMA_7B if DEVICE == "cuda" else TINY
    lm = random_model(shape, dtype=torch.bfloat16, device=DEVICE)
    figures = measure_roofline(lm)
    show(**figures)
    assert min(figures["ms"]) > 0
