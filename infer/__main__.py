"""python -m infer: complete one prompt, plainly (decode.k=0) or with SDSAT."""

import time

import torch

from conf import run
from infer.checkpoint import eos_ids, load_adaptive, load_model, load_text
from infer.config import InferConfig
from infer.drafters.adaptive import AdaptiveDrafter
from infer.drafters.plain import PlainDrafter
from infer.loop import Drafter, decode
from infer.runner import Runner


def main(config: InferConfig) -> None:
    """Print the completion as it comes, then one line of figures."""
    if config.threads:
        torch.set_num_threads(config.threads)
    drafter: Drafter = PlainDrafter()
    if config.decode.k:
        drafter = AdaptiveDrafter(load_adaptive(config.model).ids, config.decode.k)
    text, lm = load_text(config.model), load_model(config.model, dtype=config.dtype)
    prompt, limit = text.encode(config.prompt), config.decode.max_new_tokens
    runner = Runner(lm, capacity=len(prompt) + limit, max_rows=drafter.max_rows)
    began, steps, tokens, shown = time.perf_counter(), 0, list[int](), ""
    for step in decode(runner, drafter, prompt, max_new_tokens=limit, eos=eos_ids(lm)):
        steps += 1
        tokens += step.tokens
        whole = text.decode(tokens)
        if not whole.endswith("\ufffd"):  # half of a character that the next token completes
            print(whole[len(shown) :], end="", flush=True)
            shown = whole
    seconds = time.perf_counter() - began
    rate, per_forward = len(tokens) / seconds, len(tokens) / steps
    print(f"\n\n{len(tokens)} tokens, {rate:.0f} tokens/s, {per_forward:.2f} tokens per forward")


if __name__ == "__main__":
    run("infer", InferConfig, main)
