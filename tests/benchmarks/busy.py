"""Measure decoding on a busy machine for several spin times of OpenMP's waiting threads.

    python -m tests.benchmarks.busy MODEL_DIR [--dtype float32] [--cores 2] [--rounds 5]
        [--seconds 2] [--spins 1000]

Each case is a process with a loaded model. In "watch" it has as many threads as cores, and waiting
threads sleep while other programs need the cores (conf/devices/openmp.py). In the cases with a
number, waiting threads always spin this long (GOMP_SPINCOUNT; libgomp's default is 300000). In
"1 thread" no thread waits. In each round every process decodes in turn, without drafts: on a quiet
machine, next to a Python loop, and next to matrix products of another program with as many threads
and libgomp's default spin. Run it on a quiet machine.

It prints the median speed of each case, and the median ratio to the quiet speed with 300000 in the
same round. The last line is JSON.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from conf.devices.openmp import OWN_CHOICE

DEFAULT_SPIN = 300_000  # libgomp's
PROMPT = 32
MAX_TOKENS = 256
# The environment without OpenMP's variables: a decoder gets its spin, other programs the default.
CLEAN = {name: value for name, value in os.environ.items() if name not in OWN_CHOICE}
LOOP = "while True: pass"
PRODUCTS = """
import torch
rows, weights = torch.ones(64, 576), [torch.ones(3072, 576) for _ in range(60)]
print(flush=True)
while True:
    for weight in weights:
        rows @ weight.T
"""
NEIGHBOURS = {"quiet": None, "a Python loop": LOOP, "threads that spin": PRODUCTS}


class Decoder:
    """A process that decodes for a number of seconds on request."""

    def __init__(
        self, model: str, dtype: str, *, spin: int | None, threads: int
    ) -> None:
        spins = {} if spin is None else {"GOMP_SPINCOUNT": str(spin)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, model, "--serve", "--dtype", dtype],
            env=CLEAN | spins | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def speed(self, seconds: float) -> float:
        """Decode for some seconds; return tokens per second."""
        assert self._process.stdin and self._process.stdout
        print(seconds, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(model: str, dtype: str) -> None:
    """Decode without drafts for the number of seconds on each line of standard input."""
    import torch

    from infer.engine.output import Request
    from infer.engine.runner import Runner
    from infer.engine.sampling import GREEDY
    from infer.models.checkpoint import ModelDirectory
    from infer.trees.tree import Tree

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    lm = ModelDirectory(model).load(dtype=dtype, device="cpu")
    request = Request(list(range(10, 10 + PROMPT)))
    runner = Runner(lm, capacity=PROMPT + MAX_TOKENS + 1, max_rows=1)
    for line in sys.stdin:
        runner.prefill([request.prompt])
        tokens = 0
        began = time.perf_counter()
        while (seconds := time.perf_counter() - began) < float(
            line
        ) and tokens < MAX_TOKENS:
            output = runner.forward([Tree.chain(5)], [request], GREEDY)
            output.chooser(0, request.prompt)(0)
            runner.commit([[0]])
            tokens += 1
        print(tokens / seconds, flush=True)


@contextmanager
def running(code: str | None, threads: int) -> Iterator[None]:
    """Run Python code in another process within the block."""
    if code is None:
        yield
        return
    neighbour = subprocess.Popen(
        [sys.executable, "-c", code],
        env=CLEAN | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
    )
    try:
        assert neighbour.stdout
        if code == PRODUCTS:
            neighbour.stdout.readline()  # wait until it has imported PyTorch
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def measure(decoders: dict[str, Decoder], args: argparse.Namespace) -> None:
    """Measure `args.rounds` rounds; print the medians and all speeds."""
    speeds: dict[str, dict[str, list[float]]] = {
        neighbour: {name: [] for name in decoders} for neighbour in NEIGHBOURS
    }
    for turn in range(args.rounds):
        order = list(decoders)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for neighbour, code in NEIGHBOURS.items():
            with running(code, args.cores):
                for name in order:
                    speed = decoders[name].speed(args.seconds)
                    speeds[neighbour][name].append(speed)
                    print(f"{neighbour}, {name}: {speed:.1f}", file=sys.stderr)
    quiet = speeds["quiet"][str(DEFAULT_SPIN)]
    for neighbour, by_name in speeds.items():
        for name, values in by_name.items():
            ratio = median(a / b for a, b in zip(values, quiet))
            print(
                f"{neighbour:18} {name:>8}: {median(values):5.1f} tokens/s, {ratio:.2f} "
                f"({min(values):.1f} to {max(values):.1f})"
            )
    print(json.dumps(speeds))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--spins", default="1000")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.dtype)
        return
    # Exiting ends the other processes, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # The other program and the decoder share these cores, also on larger machines.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    spins = dict.fromkeys([None, DEFAULT_SPIN, *map(int, args.spins.split(","))])
    decoders = {
        "watch" if spin is None else str(spin): Decoder(
            args.model, args.dtype, spin=spin, threads=args.cores
        )
        for spin in spins
    }
    decoders["1 thread"] = Decoder(args.model, args.dtype, spin=DEFAULT_SPIN, threads=1)
    try:
        for decoder in decoders.values():
            decoder.speed(0.3)  # loads the model
        measure(decoders, args)
    finally:
        for decoder in decoders.values():
            decoder.end()


if __name__ == "__main__":
    main()
