"""Does decoding hold its memory? 10,000 tokens with each method, resident memory at every thousand.

    python -m tests.drills.long_text [--tokens 10000]

A tiny random Llama, whose cache is small beside what a leak of a row a step would be. The cache is
allocated before the first token; its address must not change. Fails when memory grows by more than 8 MiB
between the second thousand and the last.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.auto import AutoPolicy
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Drafters, Limits, decode
from infer.ngrams import Ngrams
from tests.drills.lossless import COSTS


def resident() -> float:
    """MiB of this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=10_000)
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=1000,
        max_position_embeddings=16384,
    )
    lm = LlamaForCausalLM._from_config(config).eval()
    text = Ngrams(None, 1000)
    makers = {
        "plain": Drafter,
        "prompt lookup": partial(AdaptiveDrafter, (), FixedPolicy(5), text),
        "two-forward": partial(AdaptiveDrafter, [7], FixedPolicy(5)),
        "one-forward tree": partial(AdaptiveDrafter, [7], FixedPolicy(3, "all", nodes=6, width=3)),
        "auto": partial(AdaptiveDrafter, [7], AutoPolicy(COSTS, 5), text),
    }
    worst = 0.0
    for name, new in makers.items():
        for sampling in (GREEDY, Sampling(1.0)):
            runner = Runner(lm, capacity=tokens + 10, max_rows=64)
            address, seen, count = runner._target.cache._kv.data_ptr(), list[float](), 0
            for (step,) in decode(runner, [Request([5, 6, 7])], Drafters(new), Limits(tokens), sampling):
                if (count + len(step.tokens)) // 1000 > count // 1000:
                    seen.append(resident())
                count += len(step.tokens)
            assert runner._target.cache._kv.data_ptr() == address
            growth = seen[-1] - seen[1]
            worst = max(worst, growth)
            print(
                f"{name:16} T={sampling.temperature}: {count} tokens, {seen[1]:.0f} MiB after 2,000, "
                f"{growth:+.1f} MiB since",
                flush=True,
            )
    sys.exit(worst > 8)


if __name__ == "__main__":
    main()
