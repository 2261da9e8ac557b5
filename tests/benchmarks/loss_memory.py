"""What the loss of one long sequence needs above its hidden states, at most.

    python -m tests.benchmarks.loss_memory [--width 4096] [--vocab 32016] [--chunk 1024]

16,384 positions in bfloat16, value and gradients (of the hidden states and of the head), with
train.loss and with all logits at once, each in a process of its own. One thread; minutes at
CodeLlama's width.
The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.benchmarks.objectives import resident
from train.loss import draft_loss

POSITIONS = 16_384


def measure(arguments: argparse.Namespace) -> None:
    """Print MiB above the inputs at the peak, and seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, arguments.width, dtype=torch.bfloat16, requires_grad=True)
    head = (torch.randn(arguments.vocab, arguments.width, dtype=torch.bfloat16) * 0.02).requires_grad_()
    labels = torch.randint(0, arguments.vocab, (POSITIONS,))
    weights = torch.full((POSITIONS,), 1 / POSITIONS)
    held = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held
    began = time.perf_counter()
    if arguments.of == "train.loss":
        loss, *_ = draft_loss(hidden, head, labels, weights, chunk=arguments.chunk)
    else:
        loss = (F.cross_entropy((hidden @ head.T).float(), labels, reduction="none") * weights).sum()
    loss.backward()
    print(resident("VmHWM") - held, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32_016)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--of", choices=("train.loss", "all logits at once"))
    arguments = parser.parse_args()
    if arguments.of:
        measure(arguments)
        return
    rows = {}
    for of in ("train.loss", "all logits at once"):
        command = [sys.executable, "-m", "tests.benchmarks.loss_memory", "--of", of]
        command += [f"--{name}={getattr(arguments, name)}" for name in ("width", "vocab", "chunk")]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        rows[of] = {"mib": float(printed[0]), "seconds": float(printed[1])}
        print(f"{of:18} {rows[of]['mib']:8.0f} MiB above its inputs, {rows[of]['seconds']:.0f} s")
    print(json.dumps({"positions": POSITIONS, **vars(arguments), "rows": rows}))


if __name__ == "__main__":
    main()
