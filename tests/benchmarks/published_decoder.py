"""Compare SDSAT's published decoder with this project's on one export: texts and speed.

    git clone https://github.com/ainergy-ml/SDSAT
    python -m venv SDSAT/.venv
    SDSAT/.venv/bin/pip install "torch==$TORCH" transformers==4.36.2 "numpy<2"
    python -m tests.benchmarks.published_decoder SDSAT MODEL_DIR PROMPTS.jsonl
        [--count 24] [--new 200] [--rounds 1] [--k 3 5] [--dtypes float32 bfloat16]

TORCH is the version in this environment. The published code needs an old Transformers, so it runs
in a separate process (published_peer.py) in that virtual environment; its code is not part of this
project. It does not support grouped heads, so both sides decode a copy of the model with a
key head for each query head.

Decoding is greedy and does not stop at the end of a text, so that all texts have the same length.
Both processes have one thread; on a CPU the thread's CPU time counts. The decoders take turns on
every prompt. A speedup is relative to the published decoder with its best k on the same prompts,
with a 95 % interval. The command counts texts that equal the published plain decoding's; in
float32 it fails if one differs. The last line is JSON.
"""

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from conf.runs.files import read_json, write_json
from infer.bench.prompts import Prompt
from infer.bench.runs import Decoder, Run
from infer.bench.timing import TextTimes, speedup, speedup_interval
from infer.drafters.costs import prior_costs
from infer.drafters.planner import MeasuredPlanner
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits
from infer.models.checkpoint import ModelDirectory
from infer.ngrams import Ngrams
from infer.trees.mask_tokens import NO_MASK
from tests.benchmarks.runs import clock, loop_decoder
from tests.benchmarks.shapes import held_out_prompts
from tests.infer.library import by_tokens

PEER = Path(__file__).with_name("published_peer.py")
PLAIN = "published plain"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def copy_for_both(model: Path, out: Path) -> None:
    """Copy a model directory with repeated key heads, one for each query head.

    This does not change logits. rope_theta is written where the old Transformers reads it.
    """
    shutil.copytree(model, out)
    config = read_json(out / "config.json")
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    write_json(out / "config.json", config)
    for file in out.glob("model*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                heads = weight.unflatten(0, (-1, config["head_dim"]))
                weights[name] = heads.repeat_interleave(groups, 0).flatten(0, 1)
        save_file(weights, file, metadata={"format": "pt"})


class Peer:
    """The published decoders in a process of their own."""

    def __init__(self, checkout: Path, *arguments: object) -> None:
        python = checkout / ".venv" / "bin" / "python"
        command = [python, "-W", "ignore", PEER, checkout, *arguments]
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def decoder(self, k: int, new: int) -> Decoder:
        def run(prompt: Prompt) -> Run:
            assert self._process.stdin and self._process.stdout
            request = {"ids": list(prompt.ids), "k": k, "new": new}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            for line in self._process.stdout:
                if line.startswith("{"):  # the published code prints other lines
                    return Run(**json.loads(line))
            raise SystemExit("error: the published decoder ended, see its error above")

        return run

    def close(self) -> None:
        self._process.communicate()


def project_decoders(
    model: str, dtype: str, new: int, longest: int
) -> dict[str, Decoder]:
    """Return this project's plain decoding, and drafting by adaptive tokens, n-grams and both."""
    directory = ModelDirectory(model)
    lm = directory.load(dtype=dtype)
    adaptive = directory.need_adaptive()
    mask = adaptive.mask(lm.config.get_text_config().vocab_size)
    costs = prior_costs(lm.device.type)
    table = Ngrams(directory.ngrams, lm.config.vocab_size, weights=adaptive.ngrams)
    planner = MeasuredPlanner(costs, adaptive.L)
    decoders = {
        "plain": Drafters(),
        "adaptive": by_tokens(mask, planner),
        "ngrams": by_tokens(NO_MASK, MeasuredPlanner(costs), table),
        "hybrid": by_tokens(mask, planner, table),
    }
    runner = Runner(lm, capacity=longest + new, max_rows=64)
    timer = time.thread_time if DEVICE == "cpu" else clock
    return {
        f"project {name}": loop_decoder(runner, drafters, Limits(new, []), clock=timer)
        for name, drafters in decoders.items()
    }


def compare(
    decoders: Mapping[str, Decoder], prompts: Sequence[Prompt], rounds: int
) -> dict[str, Any]:
    """Return a row for each decoder: its speedup over the best published one, and equal texts.

    The decoders take turns on every prompt, in rotating order.
    """
    names = list(decoders)
    for decode in decoders.values():  # warm up
        decode(prompts[0])
    turns: list[list[dict[str, Run]]] = [[] for _ in prompts]  # by prompt and round
    for round_ in range(rounds):
        for index, prompt in enumerate(prompts):
            first = (round_ + index) % len(names)
            order = names[first:] + names[:first]
            turns[index].append({name: decoders[name](prompt) for name in order})
    runs = [run for by_round in turns for run in by_round]
    published = [name for name in names if name.startswith("published k=")]
    best = min(published, key=lambda name: median(run[name].seconds for run in runs))
    rows = {}
    for name in names:
        times = [
            TextTimes.of_whole_texts(
                [[run[key].seconds for run in row] for row in turns]
            )
            for key in (best, name)
        ]
        scale = [1.0] * len(turns)  # all texts have the same length
        ratio = float(speedup(times[0], times[1], scale)[0])
        interval = speedup_interval(times[0], times[1], scale)
        same = sum(run[name].tokens == run[PLAIN].tokens for run in runs)
        rows[name] = {"speedup": ratio, "interval": interval, "same": same}
    return {"best": best, "compared": len(runs), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = TemporaryDirectory()
    copy_for_both(args.model, Path(folder.name) / "model")
    args.model = f"{folder.name}/model"
    prompts = held_out_prompts(args.model, args.prompts, args.count)
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = ModelDirectory(args.model).need_adaptive().ids
    if not ids:
        parser.error(
            "the published decoder needs a model with adaptive ids, got objective.mask=noise"
        )
    results = {}
    for dtype in args.dtypes:
        peer = Peer(args.checkout.absolute(), args.model, dtype, DEVICE, ids[0])
        decoders = {PLAIN: peer.decoder(0, args.new)}
        decoders |= {f"published k={k}": peer.decoder(k, args.new) for k in args.k}
        decoders |= project_decoders(args.model, dtype, args.new, longest)
        result = results[dtype] = compare(decoders, prompts, args.rounds)
        peer.close()
        for name, row in result["rows"].items():
            print(f"{dtype:9} {name:18} {row}")
        same = min(row["same"] for row in result["rows"].values())
        if dtype == "float32" and same < result["compared"]:
            raise SystemExit(
                f"error: float32 texts must equal {PLAIN} decoding's, "
                f"got {same} of {result['compared']} equal"
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
