"""The plan's memory beside the peak of real training steps, on models of several sizes.

    python -m tests.benchmarks.memory [ROWS...]      # numbers of rows to run; all of them by default

Every row is a subprocess per rank that starts the engine and trains four steps. Measured is what
the process holds at its fullest moment above what it held before the model was built: resident
memory on a CPU, where freed blocks go back to the kernel at once (the MALLOC_ settings below), or
what torch allocated on a GPU. The last line is JSON.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.benchmarks.shapes import RETURN_FREED, forget_peak, resident

if TYPE_CHECKING:
    from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
LLAMA = {  # vocabulary, width, middle width, layers, heads, key and value heads
    "10M": (4096, 256, 704, 10, 4, 4),
    "30M": (8192, 512, 1376, 7, 8, 8),
    "30M wide": (32016, 512, 1376, 1, 8, 8),
    "100M": (16384, 768, 2048, 11, 12, 4),
}
OFFLOAD = (
    "deepspeed.zero_optimization.offload_optimizer.device=cpu",
    "deepspeed.zero_force_ds_cpu_optimizer=false",
)
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
    ("30M", 1024, 1, 1, "fp32", False, "objective=branch"),
    ("30M", 1024, 1, 1, "fp32", False, "lora.rank=8"),
    ("30M", 512, 2, 2, "bf16", True, *OFFLOAD),
    (
        "30M",
        1024,
        1,
        1,
        "fp32",
        False,
        "global_batch=2",
        "micro_batch=2",
        "objective=causal",
    ),
]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
}
STEPS = 4
MIB = 2**20
LINE = "{:<3} {:9} {:>6} {:>5} {:>4}  {:4} {:4} {:>8} {:>6} {:>5}  {}"


def overrides(row: tuple) -> list[str]:
    name, tokens, ranks, stage, kind, checkpointing, *more = row
    fields = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    shape = dict(zip((*fields, "num_key_value_heads"), LLAMA[name], strict=True))
    return [
        "model=pretrained",
        "model.random_init=true",
        *(f"model.shape.{field}={value}" for field, value in shape.items()),
        f"model.shape.max_position_embeddings={tokens}",
        f"model.activation_checkpointing={str(checkpointing).lower()}",
        f"deepspeed=zero{stage}",
        f"dtype={'bfloat16' if kind == 'bf16' else 'float32'}",
        f"global_batch={ranks}",
        "tracker.mode=disabled",
        *more,
    ]


def worker(row: tuple) -> None:
    """One rank: prints the bytes of its fullest moment, while the engine starts and while it steps."""
    from conf import settings
    from train import engine as engines
    from train.config import TrainConfig

    torch.set_num_threads(1)
    config = settings("train", TrainConfig, overrides(row))
    rank, ranks = engines.start()
    small = [f"model.shape.{name}={value}" for name, value in SMALL.items()]
    # Libraries load code and make buffers when they are first used: that is not the run's memory.
    train(settings("train", TrainConfig, [*overrides(row), *small]), tokens=16)
    gc.collect()
    base = resident("VmRSS")
    start = train(config, tokens=row[1]) - base
    peak = (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else resident("VmHWM") - base
    )
    if rank == 0:
        print(json.dumps({"start": start, "peak": peak}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train(config: "TrainConfig", *, tokens: int) -> int:
    """Some steps on random sequences of `tokens`; returns the highest resident memory before the first."""
    from data_prep.vocab import Vocab
    from train import engine as engines
    from train.data import lay_out, to_tensors
    from train.model import assemble

    forget_peak()
    size = config.model.shape["vocab_size"]
    none = dict.fromkeys(("pre", "suf", "mid", "eot"))
    vocab = Vocab(size=size, bos=0, eos=1, adaptive=tuple(range(2, 9)), **none)
    engine = engines.Engine(assemble(config, vocab)[0], config)
    highest = resident("VmHWM")
    forget_peak()
    generator = np.random.default_rng(torch.distributed.get_rank())
    for step in range(STEPS):
        batches = []
        for _ in range(config.accumulations(torch.distributed.get_world_size())):
            sequences = [
                SimpleNamespace(
                    tokens=generator.integers(9, size, tokens),
                    documents=np.zeros(tokens, int),
                )
                for _ in range(config.micro_batch)
            ]
            layout = lay_out(
                sequences, range(len(sequences)), vocab, config.objective, seed=(step,)
            )
            batches.append(to_tensors(layout, engine.device))
        engine.step(batches, 1e-4, key=(0, step))
    return highest


def measure(number: int) -> dict[str, int]:
    ranks = ROWS[number][2]
    environment = (
        os.environ | RETURN_FREED | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    )
    head = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        "-m",
    ]
    command = [*head, "tests.benchmarks.memory", "worker", str(number)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(run.stdout + run.stderr)
    return json.loads(
        next(line for line in run.stdout.splitlines() if line.startswith('{"start"'))
    )


def main(numbers: list[int]) -> None:
    from conf import settings
    from train.config import TrainConfig
    from train.plan import estimate_memory
    from train.pretrained import model_config

    result = []
    titles = (
        "model",
        "tokens",
        "ranks",
        "ZeRO",
        "type",
        "ckpt",
        "measured",
        "plan",
        "ratio",
    )
    print(LINE.format("", *titles, "settings"))
    for number in numbers:
        name, tokens, ranks, stage, kind, checkpointing, *more = ROWS[number]
        config = settings("train", TrainConfig, overrides(ROWS[number]))
        plan = estimate_memory(
            model_config(config.model),
            config,
            ranks=ranks,
            seq_len=tokens,
        )
        peak, total = measure(number)["peak"], plan.total
        if not torch.cuda.is_available():
            total += plan.host  # the same memory here
        result.append({"row": ROWS[number], "measured": peak, "plan": total})
        figures = (f"{peak / MIB:.0f}", f"{total / MIB:.0f}", f"{total / peak:.2f}")
        remaining = "yes" if checkpointing else "no"
        message = " ".join(more)
        print(
            LINE.format(
                number, name, tokens, ranks, stage, kind, remaining, *figures, message
            ),
            flush=True,
        )
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(ROWS[int(sys.argv[2])])
    else:
        main([int(number) for number in sys.argv[1:]] or list(range(len(ROWS))))
