"""Reduce the rank of an adapter, and print how much of it remains.

    python -m tests.benchmarks.adapter_rank ADAPTER_DIR OUT_DIR [--rank 16]

Each product B·A keeps only its largest singular values. For each type of layer the command
prints the share of squared singular values that remains. The adapter in adapters/ was trained
at rank 32 and reduced to rank 28 by this command, to stay below 20 MB.
"""

import argparse
import json
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
from safetensors.torch import load_file, save_file

from conf.adapter import CONFIG, WEIGHTS
from infer.models.gated import A, B


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    shutil.copytree(args.adapter, args.out)
    settings = json.loads((args.out / CONFIG).read_text())
    scaling = settings["lora_alpha"] / settings["r"]
    weights = load_file(args.out / WEIGHTS)
    shares_of_kind = defaultdict(list)
    for name in [name for name in weights if name.endswith(A)]:
        layer = name.removesuffix(A)
        a, b = weights[name], weights[layer + B]
        q_a, r_a = torch.linalg.qr(a.double().T)
        q_b, r_b = torch.linalg.qr(b.double())
        u, values, v = torch.linalg.svd(r_b @ r_a.T)
        squares = values.square()
        shares_of_kind[layer.rpartition(".")[2]].append(
            squares[: args.rank].sum() / squares.sum()
        )
        root = (scaling * values[: args.rank]).sqrt()
        weights[layer + B] = (q_b @ u[:, : args.rank] * root).to(b.dtype)
        weights[name] = ((q_a @ v.T[:, : args.rank] * root).T).to(a.dtype).contiguous()
    settings |= {"r": args.rank, "lora_alpha": args.rank}
    save_file(weights, args.out / WEIGHTS, metadata={"format": "pt"})
    (args.out / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True))
    for kind, shares in sorted(shares_of_kind.items()):
        print(f"{kind:10} keeps {100 * mean(map(float, shares)):.1f} %")


if __name__ == "__main__":
    main()
