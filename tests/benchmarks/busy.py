"""Decoding on a busy machine: tokens per second by how long OpenMP's threads spin, in turns.

    python -m tests.benchmarks.busy MODEL_DIR [--dtype float32] [--cores 2] [--rounds 5]
        [--seconds 2] [--spins 1000]

"watch" is a process with its model loaded and as many threads as cores, whose waiting threads sleep
while others need the cores (conf/devices/openmp.py). Each spin (GOMP_SPINCOUNT; 300000 is libgomp's own) is
one whose threads always spin so long; "1 thread" has nothing to wait for. In every round each
process decodes plainly while the others sleep: on a quiet machine, beside a Python loop, and beside
products of another program with as many threads and libgomp's own spin. Run it on a quiet machine.

Prints the median of each, and its median ratio to the quiet speed of 300000 in the same round.
The last line is JSON.
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

OWN = 300_000  # libgomp's
PROMPT = 32
MOST = 256  # tokens
# The neighbour is another program, and a decoder's spin is given: no variables of the caller.
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
    """A process that decodes for some seconds when it is asked to."""

    def __init__(
        self, model: str, dtype: str, *, spin: int | None, threads: int
    ) -> None:
        own = {} if spin is None else {"GOMP_SPINCOUNT": str(spin)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, model, "--serve", "--dtype", dtype],
            env=CLEAN | own | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def speed(self, seconds: float) -> float:
        """Return tokens per second."""
        assert self._process.stdin and self._process.stdout
        print(seconds, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(model: str, dtype: str) -> None:
    """Decode plainly for as many seconds as a line of standard input has."""
    import torch

    from infer.engine.output import Request
    from infer.engine.runner import Runner
    from infer.engine.sampling import GREEDY
    from infer.models.checkpoint import ModelDirectory
    from infer.trees.tree import Tree

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    lm = ModelDirectory(model).load(dtype=dtype, device="cpu")
    request = Request(list(range(10, 10 + PROMPT)))
    runner = Runner(lm, capacity=PROMPT + MOST + 1, max_rows=1)
    for line in sys.stdin:
        runner.prefill([request.prompt])
        tokens = 0
        began = time.perf_counter()
        while (seconds := time.perf_counter() - began) < float(line) and tokens < MOST:
            output = runner.forward([Tree.chain(5)], [request], GREEDY)
            output.chooser(0, request.prompt)(0)
            runner.commit([[0]])
            tokens += 1
        print(tokens / seconds, flush=True)


@contextmanager
def beside(code: str | None, threads: int) -> Iterator[None]:
    """Run a neighbour's code during the block."""
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
            neighbour.stdout.readline()  # it has imported PyTorch
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def measure(decoders: dict[str, Decoder], args: argparse.Namespace) -> None:
    """Print and store the speeds of `args.rounds` rounds."""
    speeds: dict[str, dict[str, list[float]]] = {
        neighbour: {name: [] for name in decoders} for neighbour in NEIGHBOURS
    }
    for turn in range(args.rounds):
        order = list(decoders)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for neighbour, code in NEIGHBOURS.items():
            with beside(code, args.cores):
                for name in order:
                    speed = decoders[name].speed(args.seconds)
                    speeds[neighbour][name].append(speed)
                    print(f"{neighbour}, {name}: {speed:.1f}", file=sys.stderr)
    quiet = speeds["quiet"][str(OWN)]
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes too
    # On larger machines too the neighbour and the decoder share these cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    spins = dict.fromkeys([None, OWN, *map(int, args.spins.split(","))])
    decoders = {
        "watch" if spin is None else str(spin): Decoder(
            args.model, args.dtype, spin=spin, threads=args.cores
        )
        for spin in spins
    }
    decoders["1 thread"] = Decoder(args.model, args.dtype, spin=OWN, threads=1)
    try:
        for decoder in decoders.values():
            decoder.speed(0.3)  # loads the model
        measure(decoders, args)
    finally:
        for decoder in decoders.values():
            decoder.end()


if __name__ == "__main__":
    main()
