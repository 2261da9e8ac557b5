"""The plan's memory beside the peak of real training steps, on models of several sizes.

    python -m tests.benchmarks.memory [ROWS...]      # numbers of rows to run; all of them by default

Every row is a subprocess per rank that starts the engine and trains four steps. Measured is what
the process holds at its fullest moment above what it held before the model was built: resident
memory on a CPU, where freed blocks go back to the kernel at once (the MALLOC_ settings below), or
what torch allocated on a GPU. The last line is JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LLAMA = {  # vocabulary, width, middle width, layers, heads, key and value heads
    "10M": (4096, 256, 704, 10, 4, 4),
    "30M": (8192, 512, 1376, 7, 8, 8),
    "30M wide": (32016, 512, 1376, 1, 8, 8),
    "100M": (16384, 768, 2048, 11, 12, 4),
}
ROWS = [  # model, tokens, ranks, ZeRO stage, type, activation checkpointing, further settings
    ("10M", 512, 1, 0, "fp32", False),
    ("10M", 512, 1, 1, "fp32", False),
    ("10M", 1024, 1, 1, "bf16", False),
    ("10M", 1024, 1, 1, "bf16", True),
    ("30M", 1024, 1, 0, "fp32", False),
    ("30M", 1024, 1, 0, "bf16", False),
    ("30M", 1024, 2, 0, "fp32", False),
    ("30M", 512, 2, 1, "fp32", False),
    ("30M", 512, 2, 1, "bf16", True),
    ("30M", 512, 2, 2, "fp32", True),
    ("30M", 512, 2, 2, "bf16", False),
    ("30M", 512, 2, 2, "bf16", True, "global_batch=8"),
    ("30M", 512, 2, 3, "fp32", False),
    ("30M", 512, 2, 3, "bf16", True),
    ("30M wide", 2048, 1, 1, "bf16", False),
    ("30M", 1024, 1, 1, "fp32", False, "objective=causal"),
    ("30M", 512, 1, 1, "fp32", False, "model.attention=eager"),
    ("100M", 256, 1, 1, "fp32", True),
    ("100M", 512, 2, 1, "bf16", True),
    ("100M", 512, 2, 2, "bf16", True),
    ("100M", 512, 2, 3, "bf16", True),
    ("100M", 512, 2, 2, "bf16", True, "+deepspeed.zero_optimization.offload_optimizer.device=cpu"),
]
STEPS = 4


def overrides(row: tuple) -> list[str]:
    name, tokens, ranks, stage, kind, checkpointing, *more = row
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = dict(zip((*fields, "num_key_value_heads"), LLAMA[name], strict=True))
    return [
        "model=pretrained",
        "model.random_init=true",
        *(f"+model.shape.{field}={value}" for field, value in shape.items()),
        f"+model.shape.max_position_embeddings={tokens}",
        f"model.activation_checkpointing={str(checkpointing).lower()}",
        f"deepspeed=zero{stage}",
        f"deepspeed.bf16.enabled={str(kind == 'bf16').lower()}",
        f"global_batch={ranks}",
        "tracker.mode=disabled",
        *more,
    ]


def worker(row: tuple) -> None:
    """One rank: prints the bytes of its fullest moment."""
    import numpy as np
    import torch

    from conf import settings
    from data_prep.shards import PackedSequence
    from data_prep.vocab import Vocab
    from train import engine as engines
    from train.config import TrainConfig
    from train.data import lay_out, to_tensors
    from train.model import AdaptiveLM, load_model

    torch.set_num_threads(1)
    config = settings("train", TrainConfig, overrides(row))
    rank, ranks = engines.start()
    size = config.model.shape["vocab_size"]
    none = dict.fromkeys(("pre", "suf", "mid", "eot"))
    vocab = Vocab(size=size, bos=0, eos=1, adaptive=tuple(range(2, 9)), **none)
    dtype = torch.bfloat16 if row[4] == "bf16" else torch.float32
    base = resident("VmRSS")
    lm = load_model(config.model, vocab=vocab, dtype=dtype, seed=0)
    engine = engines.Engine(AdaptiveLM(lm, chunk=config.loss_chunk, L=config.objective.L), config)
    del lm
    start = resident("VmHWM") - base
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident memory so far
    generator = np.random.default_rng(rank)
    for step in range(STEPS):
        batches = []
        for micro in range(config.accumulations(ranks)):
            tokens = generator.integers(9, size, row[1])
            sequence = PackedSequence(tokens=tokens, spans=None, names=None) if False else None
            del sequence
            one = type("Sequence", (), {"tokens": tokens, "documents": np.zeros(row[1], dtype=np.int64)})
            layout = lay_out([one], [micro], vocab, config.objective, seed=(step,))
            batches.append(to_tensors(layout, engine.device))
        engine.step(batches, 1e-4)
    cuda = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM") - base
    if rank == 0:
        print(json.dumps({"start": start, "peak": peak}))


def resident(name: str) -> int:
    """Bytes of this process by the kernel's count: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(number: int) -> dict[str, int]:
    """The peak of a row's first rank, in a run of its own."""
    ranks = ROWS[number][2]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    command = [*head, "tests.benchmarks.memory", "worker", str(number)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stdout + run.stderr)
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"start"')))


def main(numbers: list[int]) -> None:
    """Measure and print, row by row."""
    found = []
    for number in numbers:
        name, tokens, ranks, stage, kind, checkpointing, *more = ROWS[number]
        result = measure(number)
        print(number, ROWS[number], {k: round(v / 2**20, 1) for k, v in result.items()}, flush=True)
        found.append(result)
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(ROWS[int(sys.argv[2])])
    else:
        main([int(number) for number in sys.argv[1:]] or list(range(len(ROWS))))
