"""What a gated adapter adds to a forward, beside the same forward of plain weights.

    python -m tests.benchmarks.gated [width layers rank]        256 3 128

Random weights of a Llama shape, LoRA of that rank on all linear layers but the head, one thread, 256 tokens in
the cache. Models take turns in bursts, whose first forward is left out: it reads its weights from memory.
"""

import statistics
import sys
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from infer.engine import gate as gates
from infer.engine.attention import ProbeGate
from infer.engine.gate import GatedLinear
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree

SHAPES = ((6, 5), (11, 5), (11, 10), (36, 30))  # rows, and how many of them are probes
SHARES = {"low rank": 9.0, "dense": 0.0, "as decoded": gates.DENSE}
TURNS, BURST = 30, 6


def random_model(width: int, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    heads, inner = max(1, width // 64), width * 11 // 4
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 512}
    config = LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=heads)  # type: ignore[arg-type]
    return LlamaForCausalLM._from_config(config).to(dtype).eval()


@torch.no_grad()
def gated(lm: PreTrainedModel, rank: int, share: float) -> PreTrainedModel:
    gate, gates.DENSE = ProbeGate(), share
    for name, module in list(lm.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            a, b = torch.randn(rank, module.in_features) / 16, torch.randn(module.out_features, rank) / 64
            lm.set_submodule(name, GatedLinear(module, a.to(lm.dtype), b.to(lm.dtype), 1.0, gate))
    return lm


def burst(runner: Runner, tree: Tree) -> float:
    seconds = []
    for _ in range(BURST):
        began = time.thread_time()
        runner.forward([tree], [Request([5])], GREEDY)
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds[1:])


def main(width: int = 256, layers: int = 3, rank: int = 128) -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        lms = {"plain": random_model(width, layers, dtype)}
        lms |= {name: gated(random_model(width, layers, dtype), rank, share) for name, share in SHARES.items()}
        runners = {name: Runner(lm, capacity=512, max_rows=64, static=False) for name, lm in lms.items()}
        for runner in runners.values():
            runner.prefill([list(range(256))])
        for q, probes in SHAPES:
            tree = Tree.chain(5, list(range(q - 1 - probes)), probes=[7] * probes)
            turns = [{name: burst(runner, tree) for name, runner in runners.items()} for _ in range(TURNS)]
            plain = statistics.median(turn["plain"] for turn in turns)
            ratios = {name: statistics.median(turn[name] / turn["plain"] for turn in turns) for name in SHARES}
            told = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            print(f"{dtype}  q={q} probes={probes}  plain {1e3 * plain:.2f} ms  {told}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
