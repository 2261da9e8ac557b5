"""python -m infer.speed: plain greedy decoding, SDSAT for several k and as it chooses, and what a draft model
draws, compared and timed.

Every output of every round is compared with plain decoding of the same dtype, token by token; in float32
all must be identical, and plain decoding must equal the library's own `generate`. The models
of all dtypes are in memory together, so that they can take turns.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from conf import UserError, run
from conf.stage import is_finished, made_from, staged, write_manifest
from infer.api import check_compile
from infer.attention import library_attention
from infer.benchmarks.prompts import load_prompts
from infer.checkpoint import context_length, eos_ids, load_adaptive, load_model, load_text
from infer.config import DecodeConfig, SpeedConfig
from infer.costs import find_costs
from infer.draft import check_draft, load_draft
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy, Policy
from infer.drafters.auto import AutoPolicy
from infer.drafters.plain import PlainDrafter
from infer.drawing import Drawing
from infer.loop import Drafters, Each, Limits
from infer.measure import Decoder, Measured, Run, loop_decoder, measure
from infer.report import print_report, read_report, write_report
from infer.runner import Runner


class Key(NamedTuple):
    """A decoder in a dtype."""

    dtype: str
    decoder: str
    k: int


def main(config: SpeedConfig) -> None:
    """Measure and report, unless the folder already holds the report."""
    if config.threads:
        torch.set_num_threads(config.threads)
    adaptive = load_adaptive(config.model)
    made = made_from(config, _inputs(config), ignore=("tracker",))
    if is_finished(config.out, "report", made):
        print(f"speed: {config.out} is finished: nothing to do")
        report = read_report(Path(config.out))
    else:
        report = _measured(config, adaptive.ids, made)
    print_report(report)
    _check_identical(report["rows"])


def _measured(config: SpeedConfig, adaptive_ids: Sequence[int], made: dict[str, Any]) -> dict[str, Any]:
    """The report, written."""
    with staged(config.out) as out:
        rows = compare(config, adaptive_ids)
        report = write_report(
            out, name=Path(config.out).name, settings=asdict(config), rows=rows, tracker=config.tracker
        )
        write_manifest(out, "report", made)
    return report


def compare(config: SpeedConfig, adaptive_ids: Sequence[int]) -> list[dict[str, Any]]:
    """The report's rows: every decoder in every dtype on every prompt set."""
    text = load_text(config.model)
    prompts = {
        name: [prompt.ids for prompt in load_prompts(name, prompt_set, text, seed=config.seed)]
        for name, prompt_set in config.prompts.items()
    }
    shared = check_draft(config.draft, text) if config.draft.model else 0
    lms = {dtype: load_model(config.model, dtype=dtype) for dtype in config.dtypes}
    drawings = {dtype: _drawings(lm, config, rows=shared) for dtype, lm in lms.items()}
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        for name, token_ids in prompts.items():
            task = progress.add_task(name, total=config.rounds * len(token_ids))
            # All dtypes take turns too: plain decoding is also held against in its fastest one.
            decoders = {
                Key(dtype, *which): decoder
                for dtype, lm in lms.items()
                for which, decoder in _decoders(lm, adaptive_ids, drawings[dtype], token_ids, config).items()
            }
            advance = partial(progress.advance, task)
            found = measure(decoders, token_ids, rounds=config.rounds, advance=advance)
            rows += _rows(found, prompt_set=name)
    return rows


def _inputs(config: SpeedConfig) -> dict[str, str]:
    named = {"model": config.model, "draft": config.draft.model}
    return {
        name: folder for name, folder in named.items() if folder and (Path(folder) / "manifest.json").is_file()
    }


def _decoders(
    lm: PreTrainedModel,
    adaptive_ids: Sequence[int],
    drawings: dict[str, tuple[Drawing, str]],
    prompts: Sequence[Sequence[int]],
    config: SpeedConfig,
) -> dict[tuple[str, int], Decoder]:
    """Plain decoding, SDSAT by k and by itself, what the draft model draws, and in float32 the library's
    `generate`, by name and k.
    """
    check_compile(lm, config.compile)
    limit = context_length(lm.config)
    longest = max(map(len, prompts)) + config.max_new_tokens
    if longest > limit:
        raise UserError(
            f"max_new_tokens={config.max_new_tokens}: wanted prompt and new tokens within the model's "
            f"{limit} positions, found {longest}"
        )
    drafters = _drafters(lm, adaptive_ids, config, capacity=longest)
    size = {"batch": 1, "capacity": longest, "left": config.max_new_tokens}
    for name, (drawing, method) in drawings.items():
        drafters[(name, 0)] = drawing.drafters(DecodeConfig(method=method), **size)  # type: ignore[arg-type]
    try:
        rows = max(one.max_rows for one in drafters.values())
    except ValueError as error:
        raise UserError(str(error)) from error
    runner = Runner(lm, capacity=longest, max_rows=rows, compile=config.compile)
    limits = Limits(config.max_new_tokens, eos_ids(lm))
    decoders = {which: loop_decoder(runner, one, limits) for which, one in drafters.items()}
    if lm.dtype == torch.float32:
        decoders[("generate", 0)] = _library_decoder(lm, config.max_new_tokens)
    return decoders


def _drafters(
    lm: PreTrainedModel, adaptive_ids: Sequence[int], config: SpeedConfig, *, capacity: int
) -> dict[tuple[str, int], Drafters]:
    """Plain, the paper's two forwards by k, and the policy that chooses for itself up to the largest k."""
    most = max(config.k)
    auto = AutoPolicy(find_costs(lm, batch=1, capacity=capacity), most)
    fixed = {("sdsat", k): FixedPolicy(k) for k in config.k}
    policies: dict[tuple[str, int], Policy] = {**fixed, ("auto", most): auto}
    drafters = {which: Each(partial(AdaptiveDrafter, adaptive_ids, one)) for which, one in policies.items()}
    return {("plain", 0): Each(PlainDrafter), **drafters}


def _drawings(lm: PreTrainedModel, config: SpeedConfig, *, rows: int) -> dict[str, tuple[Drawing, str]]:
    """What the draft model draws, where there is one, and the method: by its levels, and where asked for
    by its own adaptive tokens. What they learn goes on from one set of prompts to the next.
    """
    if config.draft.model is None:
        return {}
    draft = load_draft(config.draft, lm, rows=rows, adaptive=load_adaptive(config.model))
    levels = replace(draft, adaptive=None)
    found = {name: (Drawing(lm, levels, compile=config.compile), name) for name in config.drawn}
    if draft.adaptive:
        found["gsd probes"] = (Drawing(lm, draft, compile=config.compile), "gsd")
    return found


def _library_decoder(lm: PreTrainedModel, max_new_tokens: int) -> Decoder:
    """Transformers' own greedy `generate` with its own attention."""

    def run_library(prompt: Sequence[int]) -> Run:
        ids = torch.tensor([list(prompt)], device=lm.device)
        with library_attention(lm):
            began = time.perf_counter()
            output = lm.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=next(iter(eos_ids(lm)), None),
            )
            tokens = output[0, len(prompt) :].tolist()
            seconds = time.perf_counter() - began
        return Run(tokens, seconds, len(tokens), 0, 0)

    return run_library


def _rows(found: dict[Key, Measured], *, prompt_set: str) -> list[dict[str, Any]]:
    plains = {key.dtype: measured for key, measured in found.items() if key.decoder == "plain"}
    fastest = max(plains, key=lambda dtype: plains[dtype].median_rate())
    rows = []
    for key, measured in found.items():
        plain = plains[key.dtype]
        speedups = measured.speedups(plain)
        same = sum(ours == theirs for ours, theirs in zip(measured.outputs, plain.outputs, strict=True))
        rows.append(
            {
                "decoder": key.decoder,
                "k": key.k,
                "dtype": key.dtype,
                "prompt_set": prompt_set,
                "tokens_per_second": measured.median_rate(),
                "speedup": median(speedups),
                "speedup_range": [min(speedups), max(speedups)],
                "speedup_over_fastest_plain": median(measured.speedups(plains[fastest])),
                "fastest_plain_dtype": fastest,
                "acceptance_rate": measured.acceptance_rate,
                "tokens_per_forward": measured.tokens_per_forward,
                "identical": same,
                "prompts": len(plain.outputs),
                "tokens": sum(len(tokens) for outputs in measured.outputs for tokens in outputs),
            }
        )
    return rows


def _check_identical(rows: Sequence[dict[str, Any]]) -> None:
    """A report that shows a lossy decoder is written, and then fails the run, and every later one."""
    lossy = [r for r in rows if r["dtype"] == "float32" and r["identical"] < r["prompts"]]
    if lossy:
        names = ", ".join(f"{r['decoder']} k={r['k']} on {r['prompt_set']}" for r in lossy)
        raise UserError(
            f"float32 outputs: wanted all identical to plain decoding, found differences in {names}"
        )


if __name__ == "__main__":
    run("speed", SpeedConfig, main)
