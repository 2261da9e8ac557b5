"""vLLM serves a model directory with parallel drafting: its tokens, its drafts, and what it gains by them.

    python -m tests.drills.serve_vllm MODEL_DIR HELD_OUT.jsonl [--k 5] [--count 24] [--new 64] [--rounds 3]

Wants vLLM in the environment (without a GPU, a build of it for CPUs). Greedy, one prompt at a time, by two
engines, the second of which drafts K = k + 1 tokens a step by the model's own adaptive token. Every text is
compared with plain decoding's, and the counts of accepted drafts, with tests/infer/served.py. Timed in turns
with our own loop, plain and with the paper's two forwards. The last line is JSON.
"""

import argparse
import json
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from infer.benchmarks.prompts import TokenPrompt
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.loop import Drafter, Drafters, Limits
from infer.measure.runs import Decoder, Measured, loop_decoder, measure
from infer.models.checkpoint import eos_ids, load_adaptive, load_model, load_text
from infer.speed.vllm_peer import Engines, load_engines
from tests.drills.lossless import LONGEST, prompts_of
from tests.infer.served import drafted


def own(model: str, ids: tuple[int, ...], *, k: int, new: int) -> dict[str, Decoder]:
    """Our loop, plain and as the paper drafts."""
    lm = load_model(model, dtype="float32")
    runner = Runner(lm, capacity=LONGEST + new, max_rows=k + 2)
    makers = {"plain": Drafter, "sdsat": partial(AdaptiveDrafter, ids, FixedPolicy(k))}
    limits = Limits(new, eos_ids(lm))
    return {name: loop_decoder(runner, Drafters(maker), limits) for name, maker in makers.items()}


def told(measured: Measured, baseline: Measured) -> dict[str, float | None]:
    """Tokens per second (median of the rounds), their ratio to the baseline's by round, and acceptance."""
    return {
        "tokens_per_second": measured.median_rate(),
        "ratios": measured.speedups(baseline),
        "acceptance": measured.node_efficiency,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    adaptive, text = load_adaptive(args.model), load_text(args.model)
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    ends, K = eos_ids(lm), args.k + 1
    ids = prompts_of(text, args.held_out, args.count, lm.config.vocab_size)
    prompts = [TokenPrompt(str(n), tuple(one), frozenset(), "", "") for n, one in enumerate(ids)]
    engines = load_engines(args.model, adaptive, args.k, dtype="float32", capacity=LONGEST + args.new)
    if not isinstance(engines, Engines):
        raise SystemExit(f"serve_vllm: {engines}")
    served, _ = engines.decoders(sampling=GREEDY, max_new_tokens=args.new)
    decoders = {f"vllm {'drafts' if k else 'plain'}": decoder for k, decoder in served.items()}
    decoders |= own(args.model, adaptive.ids, k=args.k, new=args.new)
    found = measure(decoders, prompts, rounds=args.rounds)
    same = dict.fromkeys(found, 0)
    counts, wanted = [0, 0, 0], [0, 0, 0]  # steps, drafts, accepted ones
    for n, prompt in enumerate(prompts):
        right = drafted(lm, prompt.ids, mask=adaptive.ids[0], K=K, new=args.new, ends=ends)
        wanted = [sum(pair) for pair in zip(wanted, (right.steps, K * right.steps, right.accepted))]
        run = found["vllm drafts"].rounds[0][n]
        counts = [sum(pair) for pair in zip(counts, (run.drafted // K, run.drafted, run.accepted))]
        for name, measured in found.items():
            same[name] += all(tokens == right.tokens for tokens in measured.outputs[n])
    import vllm  # where it is installed, which load_engines has found

    result = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "prompts": len(prompts),
        "K": K,
        "same_tokens": same,
        "steps_drafts_accepted": {"vllm": counts, "wanted": wanted},
        **{name: told(one, found["vllm plain" if "vllm" in name else "plain"]) for name, one in found.items()},
    }
    for name, value in result.items():
        print(f"{name:22} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
