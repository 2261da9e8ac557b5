"""A run of infer.speed: from the settings to the report.

Tokenizers, prompts, whether ids mean the same, and the folder are checked before any weight is read. What all
units share is measured first: the machine, its physical limit, and what rows cost.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from conf import RankLocalError, UserError
from conf.console import print_line
from conf.dtype import choose_dtype
from conf.errors import ANOTHER, NOT_IDENTICAL
from conf.files import read_result, with_checksum, write_json
from conf.stage import BEGUN, begun, existing, is_finished, made_from, partial_of, write_manifest
from infer.benchmarks.prompts import TokenPrompt
from infer.engine.sampling import GREEDY
from infer.measure import circumstances, hardware
from infer.measure.distributed import (
    HEADER,
    UNITS,
    UnitStore,
    WorkerGroup,
    folder,
    init_workers,
    rank_local_errors,
)
from infer.models.checkpoint import ModelDirectory
from infer.report.rows import label
from infer.report.terminal import print_report
from infer.report.write import write
from infer.speed import SpeedConfig
from infer.speed.aggregate import read
from infer.speed.limit import measure_limit
from infer.speed.models import ModelPool, Prepared, fingerprint_prompts, prepare
from infer.speed.profile import context_for, measure_costs
from infer.speed.work import Worker, units_of


def check_folder(out: Path, facts: Mapping[str, Any]) -> None:
    """Raise RankLocalError where `distributed.folder` would refuse the folder; leave nothing behind.

    For another number of threads, torchrun's among them, the error says how to continue.
    """
    partial = partial_of(out)
    new = [folder for folder in (partial, *partial.parents) if not folder.exists()]
    record = partial / BEGUN
    with rank_local_errors():
        machine = read_result(record).get("hardware") if record.is_file() else None
        was = machine.get("threads") if isinstance(machine, Mapping) else None
        if was not in (None, now := facts["hardware"]["threads"]):
            raise UserError(
                f"out={partial} was begun with {was} thread(s) and must go on with as many, got {now}: "
                f"give threads={was}, choose another out, or remove the folder",
                page=ANOTHER,
            )
        with begun(out, facts):
            if new and list(partial.iterdir()) == [record]:  # while no other run can begin there
                record.unlink()
                for folder in new:
                    with suppress(OSError):  # another run has begun beside it
                        folder.rmdir()


def header(
    config: SpeedConfig,
    prompts: Mapping[str, Sequence[TokenPrompt]],
    lms: Mapping[str, PreTrainedModel],
    *,
    ranks: int,
    all_: int,
) -> dict[str, Any]:
    """Return speed.json without its rows; `all_` is the number of units."""
    new = config.max_new_tokens
    lengths = {name: [len(prompt.ids) for prompt in prompt_set] for name, prompt_set in prompts.items()}
    longest = max(map(max, lengths.values()))
    # What a forward reads of the cache depends on the context: its mean over all texts, and over each set's.
    contexts = {name: mean(counts) + new / 2 for name, counts in lengths.items()}
    limits, costs = list[dict[str, Any]](), list[dict[str, Any]]()
    for dtype, lm in lms.items():
        cost = measure_costs(lm, batch=1, context=context_for(longest + new, lm), sampling=GREEDY)
        costs.append({"dtype": dtype, "rows": [*cost.rows], "ms": [*cost.ms]})
        if limit := measure_limit(lm):  # None: it is not known
            by_set = {name: limit.describe(round(value))["forward_ms"] for name, value in contexts.items()}
            context = round(mean(contexts.values()))
            limits.append(limit.describe(context) | {"forward_ms_by_set": by_set})
    return {
        **circumstances(config),
        "model": Path(config.model).resolve().name,
        "gated": ModelDirectory(config.model).gated,
        "ranks": ranks,
        "all": all_,
        "limits": limits,
        "costs": costs,
    }


KIND = "speed"
RESULT = "speed.json"


def measure_speed(config: SpeedConfig) -> None:
    """Measure and report, unless the folder already holds the measurements."""
    if config.threads:
        torch.set_num_threads(config.threads)
    workers, out = init_workers(), Path(config.out) / KIND
    dtypes = [choose_dtype(dtype) for dtype in config.dtypes]
    config = replace(config, dtypes=workers.gather(dtypes)[: len(dtypes)])
    prepared = prepare(config)
    facts = _made(config, prepared)
    if not is_finished(out, KIND, facts):
        measure(config, prepared, facts, workers)
    elif workers.first:
        print_line(f"speed: {out} is finished: nothing to do")
    if workers.first:
        _report(config)


def measure(config: SpeedConfig, prepared: Prepared, facts: Mapping[str, Any], workers: WorkerGroup) -> None:
    """Return the folder DIR/speed, made by all ranks."""
    if workers.first and prepared.k != config.k:
        print_line(f"speed: of k={config.k} the model's adaptive tokens allow {prepared.k}")
    skipped = [{"prompt_set": name, "reason": reason} for name, reason in prepared.skipped.items()]
    for entry in skipped if workers.first else ():
        print_line(f"speed: {entry['prompt_set']} is left out: {entry['reason']}")
    # What pairs must share to belong together: also the machine and the threads in use.
    settings = {name: value for name, value in facts["settings"].items() if name != "threads"}
    begun = {**facts, "settings": settings, "hardware": hardware()}
    if workers.first:
        check_folder(Path(config.out) / KIND, begun)
    config = replace(config, k=prepared.k)
    bench = ModelPool(config, prepared, device=workers.device())
    units_by_name = units_of(prepared.prompts, config.rounds, batches=config.has_batches)
    with folder(Path(config.out) / KIND, begun, workers) as partial:
        if workers.first and not (partial / HEADER).is_file():
            shared = header(config, prepared.prompts, bench.lms, ranks=workers.world, all_=len(units_by_name))
            left_out = [{"peer": name, "reason": reason} for name, reason in bench.peers.left_out.items()]
            write_json(partial / HEADER, with_checksum({**shared, "skipped": skipped, "left_out": left_out}))
        units, worker = UnitStore(partial / UNITS, list(units_by_name)), Worker(config, prepared, bench)
        left = units.open(workers)
        with Progress(disable=not workers.first) as progress:
            for name in progress.track(left, description=KIND):
                units.save(name, worker(units_by_name[name]))
        workers.wait()
        if workers.first:
            write_json(partial / RESULT, with_checksum(read(partial)))
            write_manifest(partial, KIND, facts)


def _made(config: SpeedConfig, prepared: Prepared) -> dict[str, Any]:
    """Return what the figures are of. The prompts themselves count, not where they were read."""
    inputs = existing({"model": config.model, "base": config.base, "draft.model": config.draft.model})
    facts = made_from(config, inputs, ignore=("tracker",))
    read = {f"prompts.{name}": fingerprint_prompts(prompts) for name, prompts in prepared.prompts.items()}
    return {**facts, "inputs": {**facts["inputs"], **read}}


def _report(config: SpeedConfig) -> None:
    report = write(Path(config.out), config.tracker)
    print_report(report, ["speed"])
    lossy = [
        f"{label(row)} on {row['prompt_set']}"
        for row in report["speed"]["rows"]
        if row["dtype"] == "float32" and not row["peer"] and row["identical"] < row["compared"]
    ]
    if lossy:
        raise RankLocalError(
            "float32 outputs must all be those of plain decoding, got differences in " + ", ".join(lossy),
            page=NOT_IDENTICAL,
        )
