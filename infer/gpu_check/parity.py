"""Whether drafts change a token on this device.

In float32 the tokens of every decoder must be those of plain decoding, and plain decoding's those of a
CPU. In bfloat16 and float16, where two forwards of different width may round a near-tie differently,
every token is held against one causal forward of the library over the whole text: it must be the pick
there, or nearly tie with it.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.auto import AutoPolicy
from infer.drafters.costs import Costs
from infer.engine.output import Request
from infer.engine.pick import Logits, gumbel
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.engine.static import CompileWarning
from infer.gpu_check import LIVELY, random_model
from infer.loop import Drafter, Drafters, Limits, decode
from infer.ngrams import Ngrams

NEW = 48  # tokens of every text
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.003}  # below the pick, at most
FLAT = Costs((1, 64), (1.0, 1.2))  # so that auto draws trees of many shapes
ADAPTIVE = 490  # as good as any other id of a random model
TEXT = Ngrams(None, LIVELY["vocab_size"])
DECODERS: dict[str, Callable[[], Drafter]] = {
    "plain": Drafter,
    "prompt lookup": partial(AdaptiveDrafter, (), FixedPolicy(5), TEXT),
    "two-forward": partial(AdaptiveDrafter, [ADAPTIVE], FixedPolicy(5)),
    "one-forward": partial(AdaptiveDrafter, [ADAPTIVE], FixedPolicy(5, "all")),
    "tree": partial(AdaptiveDrafter, [ADAPTIVE], FixedPolicy(3, 4, nodes=12, width=4), TEXT),
    "auto": partial(AdaptiveDrafter, [ADAPTIVE], AutoPolicy(FLAT, 5), TEXT),
}
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(1.0),
    "top_k, top_p": Sampling(0.8, top_k=10, top_p=0.95),
}
Texts = list[list[int]]


def check_parity(*, device: str, prompts: int, compile: bool) -> list[dict[str, Any]]:
    """Return a row for every comparison: what it was, and whether it `passed`."""
    slow: Any = random_model(LIVELY, dtype=torch.float32, device="cpu")
    lm = copy.deepcopy(slow).to(device=device)
    requests = _requests(prompts)
    rows = [row for name in SAMPLINGS for row in _drafted(lm, requests, name)]
    processed = [Request(request.prompt, request.seed, _penalty()) for request in requests]
    plain = _texts(lm, Drafter, processed, GREEDY, batch=1)
    texts = _texts(lm, DECODERS["tree"], processed, GREEDY, batch=3)
    rows.append({"decoder": "tree", "sampling": "repetition penalty", "batch": 3, **_identical(texts, plain)})
    if compile:
        plain = _texts(lm, Drafter, requests, GREEDY, batch=1)
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always", CompileWarning)
            texts = _texts(lm, DECODERS["tree"], requests, GREEDY, batch=1, compile=True)
        messages = [str(warning.message) for warning in raised if warning.category is CompileWarning]
        row = {"decoder": "compiled tree", "sampling": "greedy", "batch": 1, **_identical(texts, plain)}
        rows.append(row | {"fell_back": messages[0] if messages else None})
    for dtype, near in NEAR.items():
        typed = copy.deepcopy(slow).to(device=device, dtype=dtype)
        for name in ("greedy", "sampled"):
            for decoder in ("plain",) if dtype == torch.float32 else ("plain", "two-forward", "tree"):
                texts = _texts(typed, DECODERS[decoder], requests, SAMPLINGS[name], batch=1)
                judge = slow if dtype == torch.float32 else typed
                row = _near_ties(judge, requests, texts, SAMPLINGS[name], near)
                rows.append({"decoder": decoder, "sampling": name, "batch": 1, "dtype": str(dtype)[6:], **row})
    return rows


def _drafted(lm: PreTrainedModel, requests: Sequence[Request], name: str) -> list[dict[str, Any]]:
    """Compare every decoder, alone and in batches, with plain decoding alone."""
    plain = _texts(lm, Drafter, requests, SAMPLINGS[name], batch=1)
    rows = []
    for decoder, new in DECODERS.items():
        for batch in (1, 3):
            texts = _texts(lm, new, requests, SAMPLINGS[name], batch=batch)
            rows.append({"decoder": decoder, "sampling": name, "batch": batch, **_identical(texts, plain)})
    return rows


def _requests(n: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 60, (n,), generator=generator).tolist()
    vocab = LIVELY["vocab_size"]
    return [
        Request(torch.randint(0, vocab, (length,), generator=generator).tolist(), seed)
        for seed, length in enumerate(lengths)
    ]


def _penalty() -> LogitsProcessorList:
    return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])


def _texts(
    lm: PreTrainedModel,
    new: Callable[[], Drafter],
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    batch: int,
    static: bool = True,
    compile: bool = False,
) -> Texts:
    """Return the new tokens of every request, so many side by side."""
    capacity = max(len(request.prompt) for request in requests) + NEW
    rows = new().max_rows
    runner = Runner(lm, capacity=capacity, max_rows=rows, batch=batch, static=static, compile=compile)
    texts: Texts = [[] for _ in requests]
    for first in range(0, len(requests), batch):
        for steps in decode(runner, requests[first : first + batch], Drafters(new), Limits(NEW), sampling):
            for step in steps:
                texts[first + step.sequence] += step.tokens
    return texts


def _identical(texts: Texts, expected: Texts) -> dict[str, Any]:
    same, n = sum(a == b for a, b in zip(texts, expected, strict=True)), len(expected)
    return {"dtype": "float32", "identical": same, "texts": n, "passed": same == n}


@torch.inference_mode()
def _near_ties(
    judge: PreTrainedModel, requests: Sequence[Request], texts: Texts, sampling: Sampling, near: float
) -> dict[str, Any]:
    """Return how many tokens are not the judge's pick, and how far below it the worst is, in shares of the
    range of the place's logits.
    """
    head: Any = judge.get_output_embeddings()
    flips, worst = 0, 0.0
    for request, text in zip(requests, texts):
        n = len(request.prompt)
        ids = torch.tensor([[*request.prompt, *text]], device=judge.device)
        hidden = judge.get_decoder()(ids).last_hidden_state[0, n - 1 : -1]
        logits = Logits(head, hidden, head(hidden)).whole().double()
        scores = logits
        if sampling.temperature:
            places = torch.arange(n, n + len(text), device=judge.device)
            every = torch.arange(logits.shape[1], device=judge.device).expand_as(logits)
            noise = gumbel(torch.full_like(places, request.seed), places, every)
            scores = logits / sampling.temperature + noise
        below = scores.amax(1) - scores.gather(1, ids[0, n:, None])[:, 0]
        flips += int((below > 0).sum())
        worst = max(worst, float((below / (logits.amax(1) - logits.amin(1))).max()))
    tokens = sum(map(len, texts))
    return {"flips_per_1000": 1000 * flips / tokens, "worst": worst, "passed": worst <= near}
