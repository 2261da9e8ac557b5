"""Compare int8 with float32 on a CPU: speed, equal texts, held-out loss and pass@1.

    python -m tests.benchmarks.int8 MODEL_DIR HELD_OUT.jsonl [--threads 2] [--prompts 6] [--new 96]
        [--problems 20] [--documents 20] [--dtypes float32 int8] [--methods plain ngrams hybrid]

Speed is tokens per second of greedy texts after HumanEval's prompts. All dtypes and methods take
turns on each prompt; the number in parentheses is the speedup over plain decoding in the same
dtype. The command fails if a drafted text differs from plain decoding's in its dtype. It also
counts the texts that equal the first dtype's. The loss is the mean over the tokens of held-out
documents, in nats, for the first 256 tokens of each. Beside the first dtype's distribution there are
the divergence from it, the mean over the tokens of KL(first dtype's, this dtype's) in nats, and the
share of tokens with the same likeliest token. pass@1 is judged as in the report (needs bubblewrap).
--prompts 0 and --problems 0 skip their parts. The last line is JSON.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.text.rows import read_rows
from infer import DecodeConfig, Model, generate, load
from infer.bench import sandbox
from infer.bench.problems import read_problems
from infer.bench.quality import judge

TOKENS = 256  # number of tokens of each held-out document


def text_of(model: Model, prompt: str, decode: DecodeConfig) -> tuple[list[int], int]:
    """Return the new tokens and the number of forwards."""
    steps = list(generate(model, prompt, decode))
    return [token for step in steps for token in step.tokens], len(steps)


@torch.inference_mode()
def held_out(models: dict[str, Model], documents: Sequence[str]) -> dict[str, Any]:
    """Return by dtype the mean loss of the documents' tokens, and how far it is from the first dtype.

    Transformers' forward computes the hidden states, and the head in float32 the logits.
    """
    rows: dict[str, list[Tensor]] = {dtype: [] for dtype in models}
    for document in documents:
        first = None
        for dtype, model in models.items():
            ids = torch.tensor([model.text.encode(document)[:TOKENS]])
            hidden = model.lm.get_decoder()(ids).last_hidden_state[0, :-1].float()
            head: Any = model.lm.get_output_embeddings()
            log_p = F.linear(hidden, head.weight.float(), head.bias).log_softmax(-1)
            first = log_p if first is None else first
            loss = F.nll_loss(log_p, ids[0, 1:], reduction="none")
            divergence = (first.exp() * (first - log_p)).sum(-1)
            same = (first.argmax(-1) == log_p.argmax(-1)).float()
            rows[dtype].append(torch.stack([loss, divergence, same]))
    names = "loss", "divergence", "same"
    means = {dtype: torch.cat(parts, 1).mean(1) for dtype, parts in rows.items()}
    return {dtype: dict(zip(names, m.tolist())) for dtype, m in means.items()}


def speeds(
    models: dict[str, Model], methods: Sequence[str], prompts: Sequence[str], new: int
) -> dict[str, Any]:
    """Return by dtype and method the tokens per second and per forward, and the number of equal texts."""
    cells = [(dtype, method) for dtype in models for method in methods]
    rows: dict[str, Any] = {
        f"{dtype} {method}": {"seconds": [], "tokens": [], "forwards": []}
        for dtype, method in cells
    }
    texts: dict[tuple[str, str], list[list[int]]] = {cell: [] for cell in cells}
    for index, prompt in enumerate([prompts[0], *prompts]):  # the first warms up
        for dtype, method in cells:
            decode = DecodeConfig(method, max_new_tokens=new)
            began = time.perf_counter()
            tokens, forwards = text_of(models[dtype], prompt, decode)
            seconds = time.perf_counter() - began
            if index:
                row = rows[f"{dtype} {method}"]
                row["seconds"].append(seconds)
                row["tokens"].append(len(tokens))
                row["forwards"].append(forwards)
                texts[dtype, method].append(tokens)
    first, *_ = models
    for dtype, method in cells:
        row = rows[f"{dtype} {method}"]
        rates = [n / s for n, s in zip(row["tokens"], row["seconds"])]
        base = rows[f"{dtype} {methods[0]}"]
        plain = [n / s for n, s in zip(base["tokens"], base["seconds"])]
        row["tokens_per_second"] = median(rates)
        row["speedup"] = math.exp(mean(math.log(r / p) for r, p in zip(rates, plain)))
        row["tokens_per_forward"] = sum(row["tokens"]) / sum(row["forwards"])
        plain_texts = zip(texts[dtype, method], texts[dtype, methods[0]])
        row["same"] = sum(a == b for a, b in plain_texts)
        first_texts = zip(texts[dtype, method], texts[first, methods[0]])
        row[f"same as {first}"] = sum(a == b for a, b in first_texts)
    return rows


def passed(model: Model, problems: int, new: int = 256) -> int:
    """Return the number of HumanEval's first problems that the default method solves."""
    count = 0
    for problem in read_problems("humaneval", "")[:problems]:
        decode = DecodeConfig(max_new_tokens=new, stop=list(problem.stop))
        steps = generate(model, str(problem.prompt), decode)
        text = "".join(step.text for step in steps)
        count += judge(problem, problem.answer(text))["passed"]
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int8"])
    parser.add_argument("--methods", nargs="+", default=["plain", "ngrams", "hybrid"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = {dtype: load(args.model, dtype, "cpu") for dtype in args.dtypes}
    documents = [row["content"] for row in read_rows(args.held_out)][: args.documents]
    results: dict[str, Any] = {"held_out": held_out(models, documents)}
    for dtype, row in results["held_out"].items():
        print(
            f"{dtype}: held-out loss {row['loss']:.4f}, divergence {row['divergence']:.4f}, "
            f"likeliest token the same for {row['same']:.1%}",
            flush=True,
        )
    prompts = [str(problem.prompt) for problem in read_problems("humaneval", "")]
    prompts = prompts[: args.prompts]
    rows = speeds(models, args.methods, prompts, args.new) if prompts else {}
    results["speed"] = rows
    for name, row in rows.items():
        print(
            f"{name}: {row['tokens_per_second']:.1f} tokens/s ({row['speedup']:.2f}), "
            f"{row['tokens_per_forward']:.2f} tokens per forward, {row['same']} of "
            f"{args.prompts} texts equal plain decoding's, "
            f"{row[f'same as {args.dtypes[0]}']} equal {args.dtypes[0]}'s",
            flush=True,
        )
    if args.problems and not sandbox.unavailable():
        for dtype, model in models.items():
            results[f"{dtype} passed"] = solved = passed(model, args.problems)
            print(f"{dtype}: pass@1 {solved} of {args.problems}", flush=True)
    print(json.dumps(results))
    if any(row["same"] < args.prompts for row in rows.values()):
        raise SystemExit("error: texts differ from plain decoding's, see above")


if __name__ == "__main__":
    main()
