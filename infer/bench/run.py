"""A run of infer.bench: each part measured into a folder of its own, then the report of all that is there."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conf import UserError
from conf.console import print_line
from conf.dtype import choose_dtype
from conf.errors import NOT_IDENTICAL
from conf.files import with_checksum, write_json
from conf.stage import existing, is_finished, made_from, write_manifest
from infer.api import Model, generate, load
from infer.bench import gsd, quality, sandbox, speed
from infer.bench.config import DECODERS, BenchConfig
from infer.bench.harness import (
    Records,
    WorkerGroup,
    circumstances,
    hardware,
    init_workers,
    result_folder,
)
from infer.bench.problems import READERS
from infer.bench.prompts import Chat, Prompt, name_of, read_prompts
from infer.bench.report import RESULT, print_report, write_report
from infer.bench.roofline import measure_roofline
from infer.config import DecodeConfig, DraftConfig, decontaminated
from infer.models.checkpoint import ModelDirectory
from infer.models.draft import base_pieces, lacking

BY_ADAPTIVE = ("adaptive", "sdsat")  # decoders of a model with adaptive tokens alone
GROUPS = ("speed", "quality", "gsd")


def bench(config: BenchConfig) -> None:
    """Measure the parts that are not finished, write the report and print it.

    Raises UserError for what cannot be measured, and where texts differ that must be the same.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    workers = init_workers()
    config = replace(config, dtype=workers.agreed(choose_dtype(config.dtype)))
    for part in config.parts:
        MEASURES[part](config, workers)
    if workers.first:
        report = write_report(Path(config.out), config.tracker)
        print_report(report, config.parts)
        check_same(report)


def load_models(
    config: BenchConfig,
    directory: ModelDirectory,
    workers: WorkerGroup,
    *,
    draft: bool = True,
) -> tuple[Model, Model | None]:
    """Return the model, with its draft model, and the base."""
    shared: dict[str, Any] = {
        "dtype": config.dtype,
        "device": workers.device(),
        "compile": config.compile,
    }
    drafting = DraftConfig(config.draft, config.draft_adaptive) if draft else None
    model = load(directory, draft=drafting, **shared)
    base = (
        load(ModelDirectory(config.base, setting="base"), **shared)
        if config.base
        else None
    )
    return model, base


def facts_of(config: BenchConfig, part: str, **content: Any) -> dict[str, Any]:
    """Return what determines a part's result: its settings, the models' files, the machine and `content`."""
    others = [group for group in GROUPS if group != part]
    inputs = existing(
        {
            "model": config.model,
            "base": config.base,
            "draft": config.draft,
        }
    )
    facts = made_from(config, inputs, ignore=("tracker", "part", *others))
    return facts | content | {"hardware": hardware()}


def digest(value: Any) -> str:
    """Return a fingerprint of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def digest_of_prompts(sets: Mapping[str, Sequence[Prompt]]) -> str:
    """Return a fingerprint of the ids of all prompts."""
    return digest(
        {name: [prompt.ids for prompt in prompts] for name, prompts in sets.items()}
    )


def read_all_prompts(
    config: BenchConfig, directory: ModelDirectory
) -> dict[str, list[Prompt]]:
    """Return the prompts by set. Raises UserError for a base that lacks ids of theirs."""
    chat = Chat(directory.path)
    sets = {}
    for source in config.prompts:
        sets[name_of(source)] = read_prompts(
            source,
            directory.text,
            chat,
            count=config.count,
            most=config.prompt_tokens,
            seed=config.seed,
            as_chat=config.chat,
        )
    if config.base:
        named = (
            (prompt.id, prompt.ids) for prompts in sets.values() for prompt in prompts
        )
        if strange := lacking(base_pieces(config.base, directory.text), named):
            raise UserError(
                f"base={config.base} must be a model with the ids of every prompt, got {strange}"
            )
    return sets


def directory_of(config: BenchConfig) -> ModelDirectory:
    """Return the model directory of the settings."""
    return ModelDirectory(config.model)


def for_model(config: BenchConfig, directory: ModelDirectory) -> BenchConfig:
    """Return the settings without decoders that the model does not have."""
    adaptive = directory.adaptive
    if adaptive is None:
        chosen = [name for name in config.speed.decoders if name not in BY_ADAPTIVE]
        return replace(config, speed=replace(config.speed, decoders=chosen))
    # Diverse tokens are for a place each (SDSAT, Appendix B).
    ks = [k for k in config.speed.k if len(adaptive.ids) == 1 or k <= len(adaptive.ids)]
    if not ks:
        raise UserError(
            f"speed.k must be at most the {len(adaptive.ids)} diverse ids, got {config.speed.k}"
        )
    return replace(config, speed=replace(config.speed, k=ks))


def measure_speed(config: BenchConfig, workers: WorkerGroup) -> None:
    """Measure speed into out/speed."""
    directory = directory_of(config)
    config = for_model(config, directory)
    sets = read_all_prompts(config, directory)
    facts = facts_of(config, "speed", prompt_ids=digest_of_prompts(sets))
    out = Path(config.out) / "speed"
    if is_finished(out, "speed", facts):
        say(workers, f"{out} is finished: nothing to do")
        return
    turns = {
        f"{name}-{round_:03}-{index:05}": (name, round_, index)
        for name, prompts in sets.items()
        for round_ in range(config.speed.rounds)
        for index in range(len(prompts))
    }
    model, base = load_models(config, directory, workers)
    decoders = speed.decoders_of(config, model, base)

    def measure(name: str) -> dict[str, Any]:
        prompt_set, round_, index = turns[name]
        prompt = sets[prompt_set][index]
        runs = speed.measure_turn(decoders, prompt, round_ + index)
        return {"prompt_set": prompt_set, "prompt": prompt.id, "runs": runs}

    with result_folder(out, facts, workers) as partial:
        records = Records(partial / "records", list(turns))
        mine = records.open(workers)
        warm_up(decoders, sets, mine)
        records.make(mine, workers, "speed", measure)
        if workers.first:
            order = [name for named in decoders.values() for name in named]
            result = {
                "rows": speed.rows_of(records.read(), order),
                "roofline": measure_roofline(model.lm),
                "samples": [
                    sample(model, name, prompts[0], config)
                    for name, prompts in sets.items()
                ],
                "warnings": contamination(config, list(sets)),
            }
            save_result(partial, "speed", config, facts, result, gated=directory.gated)


def warm_up(
    decoders: Mapping[float, Mapping[str, speed.Decoder]],
    sets: Mapping[str, Sequence[Prompt]],
    mine: Sequence[str],
) -> None:
    """Decode the longest prompt once in every way, uncounted: kernels, graphs and caches are then there."""
    if mine:
        longest = max(
            (prompt for prompts in sets.values() for prompt in prompts),
            key=lambda p: len(p.ids),
        )
        for named in decoders.values():
            for decoder in named.values():
                decoder(longest)


def sample(
    model: Model, prompt_set: str, prompt: Prompt, config: BenchConfig
) -> dict[str, Any]:
    """Return a prompt and its greedy continuation by all sources, in pieces of [kind, text]."""
    decode = DecodeConfig(
        **DECODERS["hybrid"], max_new_tokens=config.speed.max_new_tokens
    )
    steps = list(generate(model, [prompt.ids], decode))
    pieces = [piece for step in steps for piece in zip(step.kinds, step.texts)]
    return {
        "prompt_set": prompt_set,
        "prompt": model.text.decode(prompt.ids),
        "pieces": pieces,
    }


def contamination(config: BenchConfig, names: Sequence[str]) -> list[str]:
    """Return a sentence for each benchmark that the model's data was not decontaminated against."""
    known = decontaminated(config.model)
    return [
        f"{name}: the training data was not decontaminated against it (data_prep: benchmarks=all)"
        for name in names
        if known is not None
        and name in READERS
        and name != "lines"
        and name not in known
    ]


def measure_quality(config: BenchConfig, workers: WorkerGroup) -> None:
    """Answer the benchmarks, judge the answers and write them, into out/quality."""
    directory = directory_of(config)
    benchmarks, skipped = quality.read_benchmarks(config, directory.text)
    content = digest(
        [[p.id, p.tests, p.expected] for rows in benchmarks.values() for p in rows]
    )
    facts = facts_of(config, "quality", problems=content)
    out = Path(config.out) / "quality"
    if is_finished(out, "quality", facts):
        say(workers, f"{out} is finished: nothing to do")
        return
    decoders = [
        name
        for name in config.quality.decoders
        if directory.adaptive or name not in BY_ADAPTIVE
    ]
    batches = {
        batch.name: batch for batch in quality.batches_of(config, benchmarks, decoders)
    }
    chat = Chat(directory.path) if config.chat else None
    model, base = load_models(config, directory, workers, draft=False)
    # Both read the same ids: the base has no infilling of its own.
    models = {"model": model} | (
        {"base": replace(base, text=model.text)} if base else {}
    )

    def measure(name: str) -> dict[str, Any]:
        batch = batches[name]
        return quality.answer(models[batch.who], batch, config, chat)

    with result_folder(out, facts, workers) as partial:
        answers = Records(partial / "answers", list(batches))
        answers.make(answers.open(workers), workers, "answers", measure)
        given = list(answers.read().values())
        verdicts = judge_answers(partial, given, benchmarks, workers)
        if workers.first:
            quality.write_answers(partial / "solutions", given, benchmarks)
            result = {
                "rows": quality.rows_of(given, verdicts, config.quality.k),
                "skipped": skipped,
                "warnings": [
                    *contamination(config, list(benchmarks)),
                    *not_judged(benchmarks),
                ],
            }
            save_result(
                partial, "quality", config, facts, result, gated=directory.gated
            )


def judge_answers(
    folder: Path,
    given: Sequence[Mapping[str, Any]],
    benchmarks: quality.Benchmarks,
    workers: WorkerGroup,
) -> dict[str, Any]:
    """Return the verdicts by key; each distinct answer is judged once, by one of the ranks."""
    problems = {
        (name, problem.id): problem
        for name, rows in benchmarks.items()
        for problem in rows
    }
    cases = {}
    for record in given:
        for a in record["answers"]:
            problem = problems[record["benchmark"], a["id"]]
            judged_here = (problem.tests and not sandbox.unavailable()) or record[
                "benchmark"
            ] in quality.EXACT
            if judged_here and not a["too_long"]:
                cases[quality.verdict_key(record["benchmark"], a)] = (
                    problem,
                    a["text"],
                )
    verdicts = Records(folder / "verdicts", list(cases))
    missing = verdicts.open(workers)
    with ThreadPoolExecutor(
        max(1, len(os.sched_getaffinity(0)) // workers.world)
    ) as pool:
        judged = {key: pool.submit(quality.judge, *cases[key]) for key in missing}
        verdicts.make(missing, workers, "verdicts", lambda key: judged[key].result())
    return verdicts.read()


def not_judged(benchmarks: quality.Benchmarks) -> list[str]:
    """Return why programs were not judged, if there were any."""
    programs = any(
        problem.tests for problems in benchmarks.values() for problem in problems
    )
    return [sandbox.unavailable()] if programs and sandbox.unavailable() else []


def measure_gsd(config: BenchConfig, workers: WorkerGroup) -> None:
    """Measure GSD's tables into out/gsd; each row is a record."""
    directory = directory_of(config)
    sets = read_all_prompts(config, directory)
    facts = facts_of(config, "gsd", prompt_ids=digest_of_prompts(sets))
    out = Path(config.out) / "gsd"
    if is_finished(out, "gsd", facts):
        say(workers, f"{out} is finished: nothing to do")
        return
    model, _ = load_models(replace(config, base=None), directory, workers)
    decode = DecodeConfig(
        "gsd",
        k=config.gsd.k,
        theta_prob=config.gsd.theta_prob,
        theta_sib=config.gsd.theta_sib,
        tau=config.gsd.tau,
        max_new_tokens=config.speed.max_new_tokens,
    )
    tasks = {
        f"{prompt_set}-{name}": (prompt_set, task)
        for prompt_set in sets
        for name, task in gsd.tasks_of(decode, config.gsd.parts).items()
    }

    def measure(name: str) -> dict[str, Any]:
        prompt_set, task = tasks[name]
        rows = task(model, [prompt.ids for prompt in sets[prompt_set]])
        return {"rows": [{"prompt_set": prompt_set, **row} for row in rows]}

    with result_folder(out, facts, workers) as partial:
        records = Records(partial / "records", list(tasks))
        records.make(records.open(workers), workers, "gsd", measure)
        if workers.first:
            rows = [row for record in records.read().values() for row in record["rows"]]
            result = {"rows": rows, "warnings": []}
            save_result(partial, "gsd", config, facts, result, gated=directory.gated)


def save_result(
    folder: Path,
    kind: str,
    config: BenchConfig,
    facts: Mapping[str, Any],
    result: Mapping[str, Any],
    *,
    gated: bool,
) -> None:
    """Write the result of a part, and its manifest."""
    shared = {"kind": kind, "gated": gated, **circumstances(config)}
    write_json(folder / RESULT, with_checksum({**shared, **result}))
    write_manifest(folder, kind, facts)


def say(workers: WorkerGroup, line: str) -> None:
    """Print a line once."""
    if workers.first:
        print_line(f"bench: {line}")


def check_same(report: Mapping[str, Any]) -> None:
    """Raise UserError for texts in float32 that are not plain decoding's; peers are not ours to judge."""
    for kind in ("speed", "quality"):
        part = report[kind]
        for row in (
            part["rows"] if part and part["settings"]["dtype"] == "float32" else ()
        ):
            ours = not row["decoder"].startswith(speed.PEER)
            if ours and row["same"] < row["compared"]:
                place = row.get("prompt_set") or row["benchmark"]
                raise UserError(
                    f"float32 texts must be those of plain decoding, got {row['compared'] - row['same']} of "
                    f"{row['compared']} that differ: {row['decoder']} on {place}",
                    page=NOT_IDENTICAL,
                )


MEASURES: dict[str, Callable[[BenchConfig, WorkerGroup], None]] = {
    "speed": measure_speed,
    "quality": measure_quality,
    "gsd": measure_gsd,
}
