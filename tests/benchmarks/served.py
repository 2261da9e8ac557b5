"""An export behind `transformers serve`: its texts and its speed, with its own decoder and without.

    python -m tests.benchmarks.served MODEL HELD_OUT.jsonl [--count 24] [--new 128] [--rounds 3] [--threads 1]

Two servers of one directory, with --trust-remote-code and without, are asked by the OpenAI client in turns, one
request at a time, streamed: prompts are the first halves of held-out documents. Greedy texts must be the same;
sampled ones are drawn by other random numbers. The ratio of tokens/s is taken by prompt and round, with a 95 %
interval over prompts and the rounds of each; the request's whole time counts. Then two greedy requests at once.
The last line is JSON.
"""

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai

from tests.served_openai import served

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    # do_sample, since plain decoding there takes no temperature without it
    "sampled": {
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 0,
        "extra_body": {"generation_config": '{"do_sample": true}'},
    },
}
DRAWS = 2000  # of the bootstrap


class Answer(NamedTuple):
    text: str
    tokens: int
    seconds: float
    first: float  # seconds to the first text


def ask(
    api: openai.OpenAI, model: str, prompt: str, new: int, arguments: dict[str, Any]
) -> Answer:
    began, first, texts, tokens = time.perf_counter(), 0.0, list[str](), 0
    for chunk in api.completions.create(
        model=model, prompt=prompt, max_tokens=new, stream=True, **arguments
    ):
        if chunk.choices[0].text and not texts:
            first = time.perf_counter() - began
        texts.append(chunk.choices[0].text)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return Answer("".join(texts), tokens, time.perf_counter() - began, first)


def ratio(ours: list[list[Answer]], plain: list[list[Answer]]) -> dict[str, Any]:
    """Return the median tokens/s of both, and the mean ratio with its interval; lists are by prompt."""
    rates = [
        np.array([[item.tokens / item.seconds for item in rounds] for rounds in side])
        for side in (ours, plain)
    ]
    logs, rng = np.log(rates[0] / rates[1]), np.random.default_rng(0)
    prompts, rounds = logs.shape
    drawn = [
        np.mean(
            [
                rng.choice(logs[n], rounds).mean()
                for n in rng.integers(0, prompts, prompts)
            ]
        )
        for _ in range(DRAWS)
    ]
    low, high = np.exp(np.quantile(drawn, [0.025, 0.975]))
    medians = [float(np.median(side)) for side in rates]
    return {
        "ratio": round(float(np.exp(logs.mean())), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
        "tokens_per_second": [round(item) for item in medians],
        "first_text_ms": [
            round(
                1e3
                * float(np.median([item.first for rounds in side for item in rounds]))
            )
            for side in (ours, plain)
        ],
    }


def compare(
    apis: list[openai.OpenAI], model: str, prompts: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Each kind of decoding, the two servers in turns; the first goes second in every other round."""
    result: dict[str, Any] = {}
    for name, arguments in ASKED.items():
        warm_up = [
            round(ask(api, model, prompts[0], args.new, arguments).seconds, 2)
            for api in apis
        ]
        answers: list[list[list[Answer]]] = [[[] for _ in prompts] for _ in apis]
        for turn in range(args.rounds):
            for n, prompt in enumerate(prompts):
                for side in (0, 1) if (turn + n) % 2 else (1, 0):
                    answers[side][n].append(
                        ask(apis[side], model, prompt, args.new, arguments)
                    )
        same = sum(a[0].text == b[0].text for a, b in zip(*answers))
        result[name] = {"first_request_seconds": warm_up, **ratio(*answers)}
        if name == "greedy":
            result[name]["same_texts"] = f"{same} of {len(prompts)}"
            result["two at once"] = twice(
                apis,
                model,
                prompts,
                args.new,
                [rounds[0].text for rounds in answers[1]],
            )
        print(name, result[name], flush=True)
    return result


def twice(
    apis: list[openai.OpenAI],
    model: str,
    prompts: list[str],
    new: int,
    plain: list[str],
) -> dict[str, Any]:
    """Greedy, two requests at a time: the server takes them one after the other."""
    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        answers = list(
            pool.map(
                lambda prompt: ask(apis[0], model, prompt, new, ASKED["greedy"]),
                prompts,
            )
        )
    seconds = time.perf_counter() - began
    return {
        "same_texts": f"{sum(item.text == text for item, text in zip(answers, plain))} of {len(prompts)}",
        "tokens_per_second": round(sum(item.tokens for item in answers) / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument(
        "--characters", type=int, default=600, help="of a prompt, at most"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    lines = args.held_out.read_text(encoding="utf-8").splitlines()[: args.count]
    texts = [json.loads(line)["content"] for line in lines]
    prompts = [text[: min(len(text) // 2, args.characters)] for text in texts]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(
            args.model,
            Path(folder, "ours"),
            "--dtype",
            args.dtype,
            "--trust-remote-code",
        ) as ours,
        served(args.model, Path(folder, "plain"), "--dtype", args.dtype) as plain,
    ):
        result = compare([ours, plain], str(args.model), prompts, args)
    print(
        json.dumps(
            {"prompts": len(prompts), "new": args.new, "rounds": args.rounds, **result}
        )
    )


if __name__ == "__main__":
    main()
