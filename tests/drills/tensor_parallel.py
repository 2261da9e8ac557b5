"""Tensor parallel with a draft model: two ranks against one process, prompt by prompt.

    python -m tests.drills.tensor_parallel MODEL_DIR HELD_OUT.jsonl --draft DIR [--count 200] [--ranks 2]
        [--only "greedy gsd" ...]

MODEL_DIR is divided over the ranks on this machine's CPUs; DIR is whole on each rank, and self:N is divided as
the model is. One process decodes the prompts of tests/drills/lossless.py in float32 with each method, greedily
and sampled; then the ranks do the same. For each method: the number of texts that are token for token those of
one process, and those whose steps accepted the same number of drafts (a measured budget drafts other trees in
every process). With --adaptive the draft model drafts by its own adaptive tokens. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from infer import DecodeConfig, DraftConfig, generate, load
from infer.models import parallel
from tests.drills.lossless import prompts_of

SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


def decoders(adaptive: bool, new: int) -> dict[str, DecodeConfig]:
    """All that is compared."""
    fixed = {"max_new_tokens": new, "nodes": 16}
    configs = dict[str, DecodeConfig]()
    for name, sampling in SAMPLINGS.items():
        for method in ("ssd", "gsd"):
            configs[f"{name} {method}"] = DecodeConfig(method=method, **fixed, **sampling)
        measured = DecodeConfig(method="gsd", max_new_tokens=new, **sampling)
        configs[f"{name} gsd, measured budget"] = measured
    if not adaptive:
        ratio = SAMPLINGS["sampled"] | {"verify": "ratio"}
        configs["sampled gsd, by ratio"] = DecodeConfig(method="gsd", **fixed, **ratio)
    return configs


def outputs(args: argparse.Namespace) -> dict[str, Any]:
    """The tokens of each text and the accepted drafts of each of its steps, by decoder."""
    torch.set_num_threads(1)
    device = "cpu" if parallel.processes() == 1 else None
    model = load(args.model, "float32", device, draft=DraftConfig(args.draft, adaptive=args.adaptive))
    prompts = prompts_of(model.text, args.held_out, args.count, model.lm.config.vocab_size)
    texts = dict[str, Any]()
    for name, config in decoders(args.adaptive, args.new).items():
        if args.only and name not in args.only:
            continue
        began, texts[name] = time.perf_counter(), []
        for prompt in prompts:
            steps = list(generate(model, prompt, config))
            tokens = [token for step in steps for token in step.tokens]
            texts[name].append([tokens, [step.accepted for step in steps]])
        if parallel.is_first():
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return texts


def by_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """The same from torchrun's ranks."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
        command = [sys.executable, *torchrun, "-m", "tests.drills.tensor_parallel"]
        subprocess.run([*command, *sys.argv[1:], "--out", file], check=True)
        return json.loads(file.read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="decoders by name; all where none is given")
    parser.add_argument("--out", type=Path, help="of a rank: the file that takes its texts")
    args = parser.parse_args()
    if args.out:
        texts = outputs(args)
        if parallel.is_first():
            args.out.write_text(json.dumps(texts), "utf-8")
        return
    single, divided = outputs(args), by_ranks(args)
    rows = dict[str, dict[str, int]]()
    for name, texts in single.items():
        pairs = list(zip(texts, divided[name], strict=True))
        rows[name] = {
            "texts": len(pairs),
            "same tokens": sum(ours[0] == theirs[0] for ours, theirs in pairs),
            "same steps": sum(ours == theirs for ours, theirs in pairs),
            "accepted": sum(sum(theirs[1]) for _, theirs in pairs),
        }
        print(f"{name:32}", *(f"{key} {value}" for key, value in rows[name].items()), sep="  ")
    print(json.dumps(rows))
    sys.exit(any(row["same tokens"] < row["texts"] for row in rows.values()))


if __name__ == "__main__":
    main()
