"""Is our plain decoding an honest baseline? Against the library's own `generate`, in turns.

    python -m tests.benchmarks.baseline [SIZE ...] [--new 32] [--rounds 5]     5M 15M 110M 1.1B

Random weights, the same prompt of 128 ids, greedy, one thread; `generate` with its own sdpa attention
and its default cache, and with its static cache. The clock covers prefill and decoding.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.loop import Drafter, Drafters, Limits, decode
from tests.benchmarks.shapes import random_llama


def library(lm, prompt: list[int], new: int, cache: str | None) -> Callable[[], int]:
    def run() -> int:
        ids = torch.tensor([prompt])
        options = {"cache_implementation": cache} if cache else {}
        output = lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=-1,
            pad_token_id=0,
            disable_compile=True,
            **options,
        )
        return output.shape[1] - len(prompt)

    return run


def ours(lm, prompt: list[int], new: int) -> Callable[[], int]:
    runner = Runner(lm, capacity=len(prompt) + new, max_rows=1)
    return lambda: sum(
        len(step.tokens) for (step,) in decode(runner, [Request(prompt)], Drafters(Drafter), Limits(new))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=["5M", "15M", "110M"])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for size in args.sizes:
        for dtype in (torch.bfloat16, torch.float32):
            lm = random_llama(size, dtype)
            prompt = torch.randint(2, lm.config.vocab_size, (128,)).tolist()
            ways = {
                "ours": ours(lm, prompt, args.new),
                "generate": library(lm, prompt, args.new, None),
                "generate, static cache": library(lm, prompt, args.new, "static"),
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for round_ in range(args.rounds + 1):
                for name, way in ways.items():
                    began = time.perf_counter()
                    tokens = way()
                    if round_:  # the first warms up
                        rates[name].append(tokens / (time.perf_counter() - began))
            row = f"{size:5} {dtype}: ours {statistics.median(rates['ours']):.1f} tokens/s"
            for name in list(ways)[1:]:
                ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates[name]))
                row += f", {ratio:.2f}x {name}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
