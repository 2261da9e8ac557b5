"""The least rank that an adapter needs: its products B·A cut to another rank.

    python -m tests.benchmarks.adapter_rank ADAPTER_DIR OUT_DIR [--rank 16]

Writes the adapter with the largest singular values of each product alone, and prints by
kind of layer which share of their squares is kept. The adapter in adapters/ was trained at
rank 32 and cut to 28 by this, to stay below 20 MB.
"""

import argparse
import json
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
from safetensors.torch import load_file, save_file

from infer.models.gated import CONFIG, WEIGHTS, A, B


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
        place = name.removesuffix(A)
        a, b = weights[name], weights[place + B]
        q_a, r_a = torch.linalg.qr(a.double().T)
        q_b, r_b = torch.linalg.qr(b.double())
        u, values, v = torch.linalg.svd(r_b @ r_a.T)
        squares = values.square()
        shares_of_kind[place.rpartition(".")[2]].append(
            squares[: args.rank].sum() / squares.sum()
        )
        root = (scaling * values[: args.rank]).sqrt()
        weights[place + B] = (q_b @ u[:, : args.rank] * root).to(b.dtype)
        weights[name] = ((q_a @ v.T[:, : args.rank] * root).T).to(a.dtype).contiguous()
    settings |= {"r": args.rank, "lora_alpha": args.rank}
    save_file(weights, args.out / WEIGHTS, metadata={"format": "pt"})
    (args.out / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True))
    for kind, shares in sorted(shares_of_kind.items()):
        print(f"{kind:10} keeps {100 * mean(map(float, shares)):.1f} %")


if __name__ == "__main__":
    main()
