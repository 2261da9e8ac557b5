"""A run of infer.quality: answers, then verdicts, then the result, each kept as soon as it is there."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from conf import UserError
from conf.characters import print_line
from conf.files import write_json
from conf.pages import NOT_IDENTICAL
from conf.sealed import sealed
from conf.stage import existing, is_finished, made_from, write_manifest
from infer.api import Model, load
from infer.hardware import circumstances, hardware
from infer.measure import distributed
from infer.measure.distributed import UnitStore, WorkerGroup
from infer.measure.unfinished import HEADER, UNITS, read_header
from infer.models.checkpoint import is_gated
from infer.models.draft import named_errors
from infer.quality.answers import Batch, answer
from infer.quality.config import QualityConfig
from infer.quality.result import RESULT, result
from infer.quality.verdicts import cases, digest, judge, late_ones
from infer.quality.work import Work, contaminated, find_work, whose
from infer.report.terminal import print_report
from infer.report.write import SCHEMAS, write
from infer.sandbox import Sandbox, open_sandbox


def run(config: QualityConfig) -> None:
    """Answer, judge and report, unless the folder already holds the result."""
    workers = distributed.init_workers()
    if config.threads:
        torch.set_num_threads(config.threads)
    work, out = find_work(config), Path(config.out) / "quality"
    facts = made_from(config, existing(whose(config)), ignore=("tracker", "workers")) | work.made()
    if is_finished(out, "quality", facts):
        tell(workers, f"quality: {out} is finished: nothing to do")
    else:
        _measured(config, work, facts, out, workers)
    if workers.first:
        report = write(Path(config.out), config.tracker)
        print_report(report, ["quality"])
        check_identical(report["quality"])


def _measured(
    config: QualityConfig, work: Work, facts: dict[str, Any], out: Path, workers: WorkerGroup
) -> None:
    """Return the result, written."""
    for sentence in contaminated(config, work.benchmarks):
        tell(workers, f"warning: {sentence}")
    sandbox = open_sandbox(config.sandbox) if work.executed else None
    if sandbox:
        tell(workers, f"sandbox: {sandbox.told}")
        if workers.first:
            _check_languages(sandbox, work)
    for name in set(config.decoders) - set(work.decoders):
        tell(workers, f"model={config.model} has no adaptive tokens: it is not decoded with {name}")
    with distributed.folder(out, {**facts, **_place(sandbox)}, workers) as partial:
        if workers.first and not (partial / HEADER).is_file():
            write_json(partial / HEADER, sealed(_header(config, work, sandbox)))
        answered = UnitStore(partial / UNITS, [batch.name for batch in work.batches])
        _answer(config, work, answered, workers)
        judged = _judge(config, work, answered.read(), sandbox, partial / UNITS, workers)
        if workers.first:
            header = read_header(partial / HEADER)
            write_json(partial / RESULT, sealed(result(header, answered.read() | judged)))
            write_manifest(partial, "quality", facts)


def _check_languages(sandbox: Sandbox, work: Work) -> None:
    """Raise RankLocalError, before an answer is given, for a language whose right answers would not pass."""
    with distributed.rank_local_errors():
        for language in work.executed:
            sandbox.check(language)


def _place(sandbox: Sandbox | None) -> dict[str, Any]:
    """Return what must be as it was for a run to go on, since answers and verdicts may hang on it."""
    machine = hardware()
    return {
        "hardware": {name: machine[name] for name in ("cpu", "gpu")},
        "sandbox.level": sandbox.level if sandbox else None,
    }


def _header(config: QualityConfig, work: Work, sandbox: Sandbox | None) -> dict[str, Any]:
    return {
        "schema": SCHEMAS["quality"],
        **circumstances(config),
        "gated": is_gated(config.model),
        "sandbox": {"level": sandbox.level, "told": sandbox.told} if sandbox else None,
        **work.facts(config),
    }


def _answer(config: QualityConfig, work: Work, units: UnitStore, workers: WorkerGroup) -> None:
    """Return the share of this rank in all answers; one model is in memory at a time."""
    mine = set(units.open(workers))
    with Progress(disable=not workers.first) as progress:
        task = progress.add_task("answers", total=len(mine))
        for who in whose(config):
            batches = [batch for batch in work.batches if batch.who == who and batch.name in mine]
            if not batches:
                continue
            model = _load(config, who, work, workers)
            for batch in batches:
                units.save(batch.name, _unit(model, batch, config))
                progress.advance(task)
            del model
    workers.wait()


def _unit(model: Model, batch: Batch, config: QualityConfig) -> dict[str, Any]:
    return {"index": batch.index, **batch.facts, "answers": answer(model, batch, config)}


def _load(config: QualityConfig, who: str, work: Work, workers: WorkerGroup) -> Model:
    """One of the models, which reads the problems as the tuned one was trained to."""
    folder = whose(config)[who]
    with named_errors(who, folder):
        return replace(load(folder, config.dtype, workers.device()), text=work.text)


def _judge(
    config: QualityConfig,
    work: Work,
    answered: Mapping[str, Any],
    sandbox: Sandbox | None,
    folder: Path,
    workers: WorkerGroup,
) -> dict[str, Any]:
    """Return the verdicts by unit, of which each rank made its share; those that came late once more, alone."""
    lists = list(cases(work.benchmarks, answered.values()))
    names = [f"verdicts-{index:04}-{digest(answers)}" for index, answers in enumerate(lists)]
    by_name, units = dict(zip(names, lists)), UnitStore(folder, names)
    mine = units.open(workers)
    with Progress(disable=not workers.first) as progress:
        for name in progress.track(mine, description="verdicts"):
            verdicts = judge(by_name[name], sandbox, _workers(config, workers))
            units.save(name, {"verdicts": verdicts})
    workers.wait()
    results = units.read()
    late = {f"{name}-again": late_ones(by_name[name], unit["verdicts"]) for name, unit in results.items()}
    again = UnitStore(folder, [name for name, answers in late.items() if answers])
    if workers.first:
        for name in again.open(distributed.ALONE):
            again.save(name, {"verdicts": judge(late[name], sandbox, workers=1)})
    workers.wait()
    return results | again.read()


def _workers(config: QualityConfig, workers: WorkerGroup) -> int:
    """Programs that this rank judges at once."""
    return max(1, (config.workers or len(os.sched_getaffinity(0))) // workers.world)


def tell(workers: WorkerGroup, line: str) -> None:
    """Return a line for people, once."""
    if workers.first:
        print_line(line)


def check_identical(quality: Mapping[str, Any]) -> None:
    """Return a result that shows SDSAT to be lossy is written, and then fails the run, and every later one."""
    lossy: Sequence[Mapping[str, Any]] = [row for row in quality["same"] if row["identical"] < row["compared"]]
    if lossy and quality["settings"]["dtype"] == "float32":
        names = ", ".join(f"{row['benchmark']} {row['language']}".strip() for row in lossy)
        raise UserError(
            f"float32 answers must all be those of plain decoding, got differences in {names}",
            page=NOT_IDENTICAL,
        )
