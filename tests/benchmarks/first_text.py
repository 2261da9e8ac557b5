"""Time of the first text of a new model, beside plain decoding's: nothing is known of the device yet.

    python -m tests.benchmarks.first_text MODEL_DIR PROMPTS.jsonl [--count 8] [--new 60] [--busy 2]

Every text is the first one of a process with an empty cache folder, one thread, float32 and bfloat16; `--busy`
processes run beside it and do nothing but compute. The clock starts when the model is loaded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FIRST = """
import sys, time
import torch
from infer import DecodeConfig, generate, load
model_dir, dtype, method, new, prompt = sys.argv[1:]
torch.set_num_threads(1)
model = load(model_dir, dtype)
began = time.perf_counter()
steps = list(generate(model, prompt, DecodeConfig(method or None, max_new_tokens=int(new))))
seconds = time.perf_counter() - began
print(seconds, sum(len(step.tokens) for step in steps))
"""


def first_text(model: str, dtype: str, method: str, new: int, prompt: str) -> float:
    """Return the seconds per token of the first text of a process."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", FIRST, model, dtype, method, str(new), prompt]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    seconds, tokens = output.split()
    return float(seconds) / float(tokens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--new", type=int, default=60)
    parser.add_argument("--busy", type=int, default=0)
    args = parser.parse_args()
    lines = [json.loads(line)["content"] for line in Path(args.prompts).read_text("utf-8").splitlines()]
    prompts = [line[: len(line) // 2][:600] for line in lines if len(line) > 200][: args.count]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        for dtype in ("float32", "bfloat16"):
            ratios = []
            for prompt in prompts:
                auto, plain = (
                    first_text(args.model, dtype, method, args.new, prompt) for method in ("", "plain")
                )
                ratios.append(auto / plain)
            print(
                f"{dtype}, {args.busy} busy processes: first text over plain decoding, median "
                f"{statistics.median(ratios):.2f}, worst {max(ratios):.2f} of {len(ratios)}"
            )
    finally:
        for process in busy:
            process.kill()


if __name__ == "__main__":
    main()
