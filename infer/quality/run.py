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
from infer.measure import crew
from infer.measure.crew import Members, Units
from infer.measure.unfinished import HEADER, UNITS, read_header
from infer.models.checkpoint import is_gated
from infer.models.draft import told_as
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
    members = crew.muster()
    if config.threads:
        torch.set_num_threads(config.threads)
    work, out = find_work(config), Path(config.out) / "quality"
    facts = made_from(config, existing(whose(config)), ignore=("tracker", "workers")) | work.made()
    if is_finished(out, "quality", facts):
        tell(members, f"quality: {out} is finished: nothing to do")
    else:
        _measured(config, work, facts, out, members)
    if members.first:
        report = write(Path(config.out), config.tracker)
        print_report(report, ["quality"])
        check_identical(report["quality"])


def _measured(config: QualityConfig, work: Work, facts: dict[str, Any], out: Path, members: Members) -> None:
    """The result, written."""
    for sentence in contaminated(config, work.benchmarks):
        tell(members, f"warning: {sentence}")
    sandbox = open_sandbox(config.sandbox) if work.executed else None
    if sandbox:
        tell(members, f"sandbox: {sandbox.told}")
        if members.first:
            _check_languages(sandbox, work)
    for name in set(config.decoders) - set(work.decoders):
        tell(members, f"model={config.model} has no adaptive tokens: it is not decoded with {name}")
    with crew.folder(out, {**facts, **_place(sandbox)}, members) as partial:
        if members.first and not (partial / HEADER).is_file():
            write_json(partial / HEADER, sealed(_header(config, work, sandbox)))
        answered = Units(partial / UNITS, [batch.name for batch in work.batches])
        _answer(config, work, answered, members)
        judged = _judge(config, work, answered.read(), sandbox, partial / UNITS, members)
        if members.first:
            header = read_header(partial / HEADER)
            write_json(partial / RESULT, sealed(result(header, answered.read() | judged)))
            write_manifest(partial, "quality", facts)


def _check_languages(sandbox: Sandbox, work: Work) -> None:
    """Raises LoneError, before an answer is given, for a language whose right answers would not pass."""
    with crew.told_by_its_rank():
        for language in work.executed:
            sandbox.check(language)


def _place(sandbox: Sandbox | None) -> dict[str, Any]:
    """What must be as it was for a run to go on, since answers and verdicts may hang on it."""
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


def _answer(config: QualityConfig, work: Work, units: Units, members: Members) -> None:
    """The share of this rank in all answers; one model is in memory at a time."""
    mine = set(units.open(members))
    with Progress(disable=not members.first) as progress:
        task = progress.add_task("answers", total=len(mine))
        for who in whose(config):
            batches = [batch for batch in work.batches if batch.who == who and batch.name in mine]
            if not batches:
                continue
            model = _load(config, who, work, members)
            for batch in batches:
                units.save(batch.name, _unit(model, batch, config))
                progress.advance(task)
            del model
    members.wait()


def _unit(model: Model, batch: Batch, config: QualityConfig) -> dict[str, Any]:
    return {"index": batch.index, **batch.facts, "answers": answer(model, batch, config)}


def _load(config: QualityConfig, who: str, work: Work, members: Members) -> Model:
    """One of the models, which reads the problems as the tuned one was trained to."""
    folder = whose(config)[who]
    with told_as(who, folder):
        return replace(load(folder, config.dtype, members.device()), text=work.text)


def _judge(
    config: QualityConfig,
    work: Work,
    answered: Mapping[str, Any],
    sandbox: Sandbox | None,
    folder: Path,
    members: Members,
) -> dict[str, Any]:
    """The verdicts by unit, of which each rank made its share; those that came late once more, alone."""
    lists = list(cases(work.benchmarks, answered.values()))
    names = [f"verdicts-{index:04}-{digest(answers)}" for index, answers in enumerate(lists)]
    by_name, units = dict(zip(names, lists)), Units(folder, names)
    mine = units.open(members)
    with Progress(disable=not members.first) as progress:
        for name in progress.track(mine, description="verdicts"):
            verdicts = judge(by_name[name], sandbox, _workers(config, members))
            units.save(name, {"verdicts": verdicts})
    members.wait()
    results = units.read()
    late = {f"{name}-again": late_ones(by_name[name], unit["verdicts"]) for name, unit in results.items()}
    again = Units(folder, [name for name, answers in late.items() if answers])
    if members.first:
        for name in again.open(crew.ALONE):
            again.save(name, {"verdicts": judge(late[name], sandbox, workers=1)})
    members.wait()
    return results | again.read()


def _workers(config: QualityConfig, members: Members) -> int:
    """Programs that this rank judges at once."""
    return max(1, (config.workers or len(os.sched_getaffinity(0))) // members.world)


def tell(members: Members, line: str) -> None:
    """A line for people, once."""
    if members.first:
        print_line(line)


def check_identical(quality: Mapping[str, Any]) -> None:
    """A result that shows SDSAT to be lossy is written, and then fails the run, and every later one."""
    lossy: Sequence[Mapping[str, Any]] = [row for row in quality["same"] if row["identical"] < row["compared"]]
    if lossy and quality["settings"]["dtype"] == "float32":
        names = ", ".join(f"{row['benchmark']} {row['language']}".strip() for row in lossy)
        raise UserError(
            f"float32 answers must all be those of plain decoding, got differences in {names}",
            page=NOT_IDENTICAL,
        )
