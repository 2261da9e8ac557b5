"""Measure the cost of rows of a forward on a CPU by dtype, and of its parts before and after fusing.

    python -m tests.benchmarks.rows MODEL_DIR [--dtypes float32 int8] [--threads 2]
        [--rounds 9] [--rows 1 2 4 9 16 32]

The first table is L(q): the time of q rows after 256 cached tokens, relative to one row of the
same dtype. It includes the head and the choice of a token. Rows are drafts, or with `+k` drafts
and k probes, which run the adapter. "library" is float32 with Transformers' layers on the same
packed products; "int8 by PyTorch" is int8 with PyTorch's operations instead of the functions of
native.c between the products, "bfloat16 by PyTorch" is without native.c. The second table compares
Transformers' code with this project's for each part of a layer. All cells take turns; figures are
medians, with the fastest in parentheses. With one thread the thread's CPU time counts, which other
programs change less. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from infer.engine import forward, native
from infer.engine.attention import attend, attend_wide
from infer.engine.fused import norm_of, rotate
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.models import checkpoint
from infer.models.checkpoint import ModelDirectory
from infer.trees.tree import Tree

CONTEXT = 256
LIBRARY = "library"
BY_PYTORCH = " by PyTorch"  # after the name of a type
Times = dict[str, list[float]]


def in_turns(tasks: dict[str, Callable[[], Any]], rounds: int, calls: int = 1) -> Times:
    """Return the milliseconds per call of each task in each round, after two warm-up rounds."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: Times = {name: [] for name in tasks}
    for turn in range(rounds + 2):
        for name, task in tasks.items():
            began = clock()
            for _ in range(calls):
                task()
            if turn >= 2:
                times[name].append(1e3 * (clock() - began) / calls)
    return times


def tree_of(rows: int, probes: int, probe: int) -> Tree:
    """Return a chain of drafts with probes after its last node, with `rows` nodes in all."""
    drafts = rows - probes
    tokens = (5, *range(20, 19 + drafts), *[probe] * probes)
    parents = tuple(range(-1, rows - 1))
    return Tree(tokens, parents, drafts, (drafts - 1,) if probes else ())


def forwards(
    directory: ModelDirectory,
    dtypes: Sequence[str],
    trees: dict[str, Tree],
    rounds: int,
) -> dict[str, Times]:
    """Return the times of the trees by dtype."""
    request = Request(list(range(10, 10 + CONTEXT)))
    tasks = {}
    longest = max(len(tree.tokens) for tree in trees.values())
    patches: dict[str, AbstractContextManager[Any]] = {
        LIBRARY: patch.object(forward, "decoder_of", lambda *_, **__: None),
        f"int8{BY_PYTORCH}": patch.object(native, "has_operations", lambda _: False),
        f"bfloat16{BY_PYTORCH}": patch.object(
            checkpoint, "to_bfloat16", lambda *_: False
        ),
    }
    others = [name for name in patches if name.removesuffix(BY_PYTORCH) in dtypes]
    names = [*dtypes, LIBRARY, *others]
    for name in names:
        dtype = "float32" if name == LIBRARY else name.removesuffix(BY_PYTORCH)
        with patches.get(name, nullcontext()):
            lm = directory.load(dtype=dtype, device="cpu")
            runner = Runner(lm, capacity=CONTEXT + 1, max_rows=longest)
        runner.prefill([request.prompt])
        for label, tree in trees.items():

            def task(runner: Runner = runner, tree: Tree = tree) -> None:
                output = runner.forward([tree], [request], GREEDY)
                output.chooser(0, request.prompt)(0)

            tasks[f"{name} {label}"] = task
    times = in_turns(tasks, rounds)
    return {
        name: {label: times[f"{name} {label}"] for label in trees} for name in names
    }


@torch.inference_mode()
def parts(lm: Any, rows: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the milliseconds of each part over all layers, by Transformers and by this project."""
    layer = lm.model.layers[0]
    layers = lm.config.num_hidden_layers
    d, width = lm.config.hidden_size, layer.self_attn.head_dim
    heads, keys = lm.config.num_attention_heads, lm.config.num_key_value_heads
    h = torch.randn(1, rows, d)
    positions = torch.arange(CONTEXT, CONTEXT + rows)[None]
    tables = lm.model.rotary_emb
    cos, sin = tables(h, position_ids=positions)
    turned = torch.randn(1, rows, heads + keys, width)
    query, key = turned.transpose(1, 2).split([heads, keys], 1)
    cached = torch.randn(2, 1, keys, CONTEXT + rows, width)
    wide = cached.double()
    mask = torch.zeros(1, 1, heads // keys * rows, CONTEXT + rows)
    wide_mask = mask.double()
    scaling = layer.self_attn.scaling
    column = cos.unsqueeze(2)
    pairs: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {
        "RMSNorm": (
            2 * layers + 1,
            lambda: layer.input_layernorm(h),
            partial(norm_of(layer.input_layernorm, wide=True), h),
        ),
        "rotary cosines and sines": (
            1,
            lambda: tables.rotary(h, positions),
            lambda: tables(h, position_ids=positions),
        ),
        "rotation of q and k": (
            layers,
            lambda: apply_rotary_pos_emb(query, key, cos, sin),
            lambda: rotate(turned, column, column),
        ),
        "attention, float32 and float64": (
            layers,
            lambda: attend(query, *cached, mask, scaling),
            lambda: attend_wide(query, *wide, wide_mask, scaling),
        ),
    }
    result = {}
    for name, (count, before, after) in pairs.items():
        times = in_turns({"before": before, "after": after}, rounds, calls=30)
        result[name] = (
            count * median(times["before"]),
            count * median(times["after"]),
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 9, 16, 32])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    directory = ModelDirectory(args.model)
    probe = directory.need_adaptive().mask(directory.rows or 1).row(1)[0]
    trees = {str(q): tree_of(q, 0, probe) for q in args.rows}
    trees |= {f"{q - 4}+4": tree_of(q, 4, probe) for q in args.rows if q > 8}
    times = forwards(directory, args.dtypes, trees, args.rounds)
    results: dict[str, Any] = {"forwards": times}
    for name, by_rows in times.items():
        first = by_rows["1"]
        for label, values in by_rows.items():
            cost = median(values) / median(first), min(values) / min(first)
            print(
                f"{name:15} q = {label:5} {median(values):6.1f} ({min(values):.1f}) ms, "
                f"L(q) {cost[0]:.2f} ({cost[1]:.2f})",
                flush=True,
            )
    lm: nn.Module = directory.load(dtype="float32", device="cpu")
    for rows in (1, 9):
        results[f"parts of {rows} rows"] = both = parts(lm, rows, args.rounds)
        for name, (before, after) in both.items():
            ratio = f"{before:.2f} and {after:.2f} ms, {after / before:.2f}"
            print(f"{rows} rows, {name}: {ratio}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
