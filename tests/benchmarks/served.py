"""Compare an export in `transformers serve` with and without its own decoder: texts and speed.

    python -m tests.benchmarks.served MODEL HELD_OUT.jsonl [--count 24]

Two servers of one directory, with --trust-remote-code and without, answer the OpenAI client in
turns. Requests are streamed and greedy, in float32 on one thread, in three rounds of 128 tokens;
prompts are the first halves of held-out documents. The command fails unless all texts are the
same. The speedup is of whole requests, with a 95 % interval over the prompts. The last line is
JSON.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import openai

from conf.text.rows import read_rows
from infer.bench.timing import TextTimes, speedup, speedup_interval
from tests.served_openai import served, stream

DTYPE = ("--dtype", "float32")
NEW = 128  # tokens
ROUNDS = 3
MAX_CHARACTERS = 600  # longest prompt


def ask(api: openai.OpenAI, model: Path, prompt: str) -> tuple[str, float]:
    """Return the text of an answer, and its seconds."""
    began = time.perf_counter()
    text = stream(api, model, prompt, max_tokens=NEW, temperature=0)
    return text, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--count", type=int, default=24)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    texts = [row["content"] for row in read_rows(args.held_out)[: args.count]]
    prompts = [text[: min(len(text) // 2, MAX_CHARACTERS)] for text in texts]
    seconds: dict[str, list[list[float]]] = {
        name: [[] for _ in prompts] for name in ("drafting", "plain")
    }
    same = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        served(
            args.model, Path(folder, "drafting"), *DTYPE, "--trust-remote-code"
        ) as drafting,
        served(args.model, Path(folder, "plain"), *DTYPE) as plain,
    ):
        for api in (drafting, plain):  # warm up
            ask(api, args.model, prompts[0])
        for round_ in range(ROUNDS):
            for n, prompt in enumerate(prompts):
                apis = (drafting, plain) if (round_ + n) % 2 else (plain, drafting)
                answers = {api: ask(api, args.model, prompt) for api in apis}
                seconds["drafting"][n].append(answers[drafting][1])
                seconds["plain"][n].append(answers[plain][1])
                same += answers[drafting][0] == answers[plain][0]
    times = [TextTimes.of_whole_texts(seconds[name]) for name in ("plain", "drafting")]
    scale = [1.0] * len(prompts)
    ratio = float(speedup(times[0], times[1], scale)[0])
    interval = speedup_interval(times[0], times[1], scale)
    compared = ROUNDS * len(prompts)
    print(json.dumps({"speedup": ratio, "interval": interval, "same": same}))
    if same < compared:
        raise SystemExit(f"error: all texts must be the same, got {same} of {compared}")


if __name__ == "__main__":
    main()
