"""Measure tokens per forward for several shares of n-grams among the drafts of a position.

    python -m tests.benchmarks.mixture MODEL_DIR PROMPTS... [--count 12]
        [--shares 0 0.2 0.4 0.5 0.6 1] [--temperatures 0 1]

PROMPTS are files or humaneval. The tree is fixed, so that the result does not depend on times: two
alternating forwards, k=5, 2 candidates per position, 128 new tokens. With sampling the share is
share / (1 + temperature). The command prints a line for each temperature, share and prompt set,
and one for the default of adaptive.json.
"""

import argparse

from infer.bench.prompts import name_of, read_prompts
from infer.drafters.planner import FixedPlanner
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Limits
from infer.models.checkpoint import ModelDirectory, eos_ids
from infer.ngrams import Ngrams, NgramWeights
from tests.benchmarks.runs import loop_decoder
from tests.infer.library import by_tokens

NEW = 128
PROMPT_TOKENS = 256
PLANNER = FixedPlanner(5, "root", nodes=8, width=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0, 0.2, 0.4, 0.5, 0.6, 1]
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 1])
    args = parser.parse_args()
    folder = ModelDirectory(args.model)
    lm = folder.load(dtype="float32")
    assert folder.adaptive
    vocabulary = lm.config.get_text_config().vocab_size
    runner = Runner(lm, capacity=PROMPT_TOKENS + NEW + 16, max_rows=64)
    limits = Limits(NEW, eos_ids(lm))
    rows = {str(share): NgramWeights(places=(share,)) for share in args.shares}
    rows["default"] = NgramWeights()
    for source in args.prompts:
        prompts = read_prompts(
            source,
            folder.text,
            folder.path,
            count=args.count,
            max_tokens=PROMPT_TOKENS,
            seed=0,
        )
        for temperature in args.temperatures:
            for row, weights in rows.items():
                ngrams = Ngrams(folder.ngrams, vocabulary, weights=weights)
                drafters = by_tokens(folder.adaptive.ids, PLANNER, ngrams)
                decoder = loop_decoder(runner, drafters, limits, Sampling(temperature))
                runs = [decoder(prompt) for prompt in prompts]
                tokens = sum(len(run.tokens) for run in runs)
                forwards = sum(run.forwards for run in runs)
                print(
                    f"{name_of(source)}, T={temperature:g}, share {row}: "
                    f"{tokens / forwards:.2f} tokens per forward",
                    flush=True,
                )


if __name__ == "__main__":
    main()
