"""SDSAT's published decoder beside ours, on one export: the same texts, and how fast.

    git clone https://github.com/ainergy-ml/SDSAT
    python -m tests.benchmarks.published_decoder SDSAT MODEL_DIR PROMPTS.jsonl [KEY] [--count 24] [--new 200]
        [--rounds 1] [--k 3 5] [--dtypes float32 bfloat16] [--table FILE] [--venv FOLDER]

The published code wants Transformers 4.36.2 and NumPy below 2. It runs in a process of its own
(published_peer.py), in a virtual environment that the first run makes in FOLDER, SDSAT/.venv where none is
given; PyTorch is the version that runs here. Nothing of its code is in this project.

Greedy, without an end of text: every text has the same number of tokens. Both processes have one thread, timed
on a CPU by its own clock, and take turns: every run stands beside one of the baseline (infer/bench/speed.py),
which is first the published plain decoding and then the published decoder at its best k. Ratios are those of
the pairs, with their 95 % interval (infer/bench/statistics.py). In float32 all texts must be those of the
published plain decoding, or the command fails; in bfloat16 they are counted. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infer.bench.prompts import Prompt
from infer.drafters.adaptive import AdaptiveDrafter
from infer.drafters.policy import MeasuredPolicy, prior_costs
from infer.drafters.stopwatch import Stopwatch
from infer.engine.runner import Runner
from infer.loop import Drafter, Drafters, Limits
from infer.models.checkpoint import ModelDirectory
from infer.ngrams import Ngrams, NgramTable
from tests.benchmarks.policies import Pairs, pairs, rate, speedup
from tests.benchmarks.runs import Decoder, Run, clock, loop_decoder
from tests.benchmarks.shapes import held_out_prompts

PEER = Path(__file__).with_name("published_peer.py")
NEEDED = (
    "decoders/sdsat.py",
    "decoders/autoregression.py",
    "decoders/model/modeling_llama_kv.py",
)
PACKAGES = ("transformers==4.36.2", "numpy<2")
PLAIN = "published plain"


def check_checkout(checkout: Path) -> None:
    """Raises SystemExit, with the way to get it, for a folder without the published code."""
    for name in NEEDED:
        if not (checkout / name).is_file():
            raise SystemExit(
                f"error: CHECKOUT must be a checkout of SDSAT's published decoder, got {checkout}, which has "
                f"no {name}. Run git clone https://github.com/ainergy-ml/SDSAT"
            )


def environment(folder: Path) -> Path:
    """The Python of the peer's virtual environment, which is made where there is none."""
    python = folder / "bin" / "python"
    if not (folder / "installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run(
            [*pip, f"torch=={torch.__version__.partition('+')[0]}"], check=True
        )
        subprocess.run([*pip, *PACKAGES], check=True)
        (folder / "installed").touch()
    return python


class Peer:
    def __init__(
        self, python: Path, checkout: Path, model: str, dtype: str, device: str, id: int
    ) -> None:
        command = [
            python,
            "-W",
            "ignore",
            PEER,
            checkout.resolve(),
            model,
            dtype,
            device,
            str(id),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")

    def decoder(self, k: int, new: int) -> Decoder:
        def run(prompt: Prompt) -> Run:
            assert self._process.stdin is not None
            request = {"ids": list(prompt.ids), "k": k, "new": new}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = json.loads(self._answer("{"))
            return Run(answer["tokens"], answer["seconds"], answer["forwards"], 0, 0)

        return run

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self, beginning: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        raise SystemExit(
            f"error: the peer must answer, got exit code {self._process.wait()}. Its error is above"
        )


def our_decoders(
    args: argparse.Namespace, dtype: str, longest: int
) -> dict[str, Decoder]:
    """Plain, and `auto` with adaptive tokens alone, with n-grams alone and with all sources, the default."""
    lm, adaptive = (
        ModelDirectory(args.model).load(dtype=dtype),
        ModelDirectory(args.model).need_adaptive(),
    )
    costs = prior_costs(lm.device.type)
    stopwatch = Stopwatch(lm)
    makers: dict[str, Any] = {"plain": Drafter}
    table = NgramTable(args.table) if args.table else ModelDirectory(args.model).ngrams
    ngrams = Ngrams(table, lm.config.vocab_size, weights=adaptive.ngrams)
    makers["adaptive only"] = partial(
        AdaptiveDrafter,
        adaptive.ids,
        MeasuredPolicy(costs, adaptive.L),
        stopwatch=stopwatch,
    )
    makers["n-grams only"] = partial(
        AdaptiveDrafter, (), MeasuredPolicy(costs, 0), ngrams, stopwatch=stopwatch
    )
    makers["default"] = partial(
        AdaptiveDrafter,
        adaptive.ids,
        MeasuredPolicy(costs, adaptive.L),
        ngrams,
        stopwatch=stopwatch,
    )
    runner = Runner(lm, capacity=longest + args.new, max_rows=64)
    timer = time.thread_time if lm.device.type == "cpu" else clock
    return {
        f"ours, {name}": loop_decoder(
            runner, Drafters(new), Limits(args.new, []), clock=timer
        )
        for name, new in makers.items()
    }


def ratio(pairs_of: Pairs) -> dict[str, Any]:
    """Tokens per second over the baseline's, with the 95 % interval."""
    ratio, interval = speedup(pairs_of)
    return {"ratio": ratio, "interval": interval}


def compare(
    decoders: Mapping[str, Decoder], prompts: list[Prompt], rounds: int
) -> dict[str, Any]:
    """A row for each decoder: its rate, and its ratios to the two baselines."""
    first = pairs(dict(decoders), prompts, rounds=rounds, baseline=PLAIN)
    baselines = [base for by in next(iter(first.values())) for _, base in by]
    rates = {PLAIN: statistics.median(map(rate, baselines))}
    for name, by in first.items():
        rates[name] = statistics.median(rate(run) for item in by for run, _ in item)
    published = [
        name for name in decoders if name.startswith("published") and name != PLAIN
    ]
    best = max(published, key=rates.__getitem__)
    ours = {
        name: item
        for name, item in decoders.items()
        if name.startswith("ours") or name == best
    }
    second = pairs(ours, prompts, rounds=rounds, baseline=best)
    rows: dict[str, Any] = {
        PLAIN: {
            "tokens_per_second": rates[PLAIN],
            PLAIN: {"ratio": 1.0, "interval": None},
        }
    }
    for name, by in first.items():
        runs = [pair for item in by for pair in item]
        rows[name] = {
            "tokens_per_second": rates[name],
            "tokens_per_forward": statistics.fmean(
                len(run.tokens) / run.forwards for run, _ in runs
            ),
            PLAIN: ratio(by),
            best: ratio(second[name]) if name in second else None,
            "identical": sum(run.tokens == base.tokens for run, base in runs),
            "compared": len(runs),
        }
    return {"best": best, "rows": rows}


def show(result: Mapping[str, Any], title: str) -> None:
    best = result["best"]
    print(
        f"{title}\n{'':24} {'tok/s':>7} {'tok/fwd':>8} {'x ' + PLAIN:>24} {'x ' + best:>24} {'same':>8}"
    )
    for name, row in result["rows"].items():
        cells = [
            f"{row['tokens_per_second']:7.0f}",
            f"{row.get('tokens_per_forward', 1.0):8.2f}",
        ]
        for baseline in (PLAIN, best):
            item = row.get(baseline)
            interval = (
                f" ({item['interval'][0]:.2f}-{item['interval'][1]:.2f})"
                if item and item["interval"]
                else ""
            )
            cells.append(
                f"{item['ratio']:.2f}{interval}".rjust(24) if item else " " * 24
            )
        same = f"{row['identical']}/{row['compared']}" if "compared" in row else ""
        print(f"{name:24}", *cells, f"{same:>8}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("key", nargs="?", default="content")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--table",
        type=Path,
        help="of n-grams; the model directory's where none is given",
    )
    parser.add_argument(
        "--venv", type=Path, help="of the peer; CHECKOUT/.venv where none is given"
    )
    args = parser.parse_args()
    check_checkout(args.checkout)
    python = environment((args.venv or args.checkout / ".venv").resolve())
    torch.set_num_threads(1)
    prompts = held_out_prompts(args.model, args.prompts, args.key, args.count)
    id = ModelDirectory(args.model).need_adaptive().ids[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {}
    for dtype in args.dtypes:
        peer = Peer(python, args.checkout, args.model, dtype, device, id)
        decoders = {PLAIN: peer.decoder(0, args.new)}
        decoders |= {f"published k={k}": peer.decoder(k, args.new) for k in args.k}
        decoders |= our_decoders(
            args, dtype, max(len(prompt.ids) for prompt in prompts)
        )
        results[dtype] = compare(decoders, prompts, args.rounds)
        peer.close()
        show(
            results[dtype],
            f"{dtype}, {len(prompts)} prompts x {args.new} tokens, {device}",
        )
    print(json.dumps(results))
    rows = results.get("float32", {"rows": {}})["rows"]
    differing = [
        name
        for name, row in rows.items()
        if row.get("identical") != row.get("compared")
    ]
    if differing:
        raise SystemExit(
            f"error: float32 texts must be those of {PLAIN}, got others from {', '.join(differing)}"
        )


if __name__ == "__main__":
    main()
