"""A run of infer.quality: answers, then verdicts, then the result, each kept as soon as it is there.

Every distinct answer is judged once, whoever gave it. All answers are there before the first is judged:
programs that run beside a model would slow each other down, and a time limit would decide on what was only
late. Programs slow each other down too: one that the clock on the wall stopped is judged again, alone, and that
verdict counts.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress

from conf import UserError
from conf.console import print_line
from conf.dtype import choose_dtype
from conf.errors import NOT_IDENTICAL
from conf.files import with_checksum, write_json
from conf.stage import existing, is_finished, made_from, write_manifest
from infer.api import load
from infer.benchmarks.rows import Problem
from infer.measure import circumstances, distributed, hardware
from infer.measure.distributed import HEADER, UNITS, UnitStore, WorkerGroup, read_header
from infer.models.checkpoint import ModelDirectory
from infer.quality import QualityConfig
from infer.quality.result import RESULT, result
from infer.quality.work import Work, answer_key, completion, contaminated, find_work, models
from infer.report.terminal import print_report
from infer.report.write import SCHEMAS, write
from infer.sandbox import Sandbox, open_sandbox

TOGETHER = 32  # verdicts in a unit
LATE = re.compile(r"timed out after \S+ s")  # by the clock on the wall, not "of computing"


def measure_quality(config: QualityConfig) -> None:
    """Answer, judge and report, unless the folder already holds the result."""
    workers = distributed.init_workers()
    if config.threads:
        torch.set_num_threads(config.threads)
    config = replace(config, dtype=workers.gather([choose_dtype(config.dtype)])[0])
    work, out = find_work(config), Path(config.out) / "quality"
    facts = made_from(config, existing(models(config)), ignore=("tracker", "workers")) | work.made()
    if is_finished(out, "quality", facts):
        tell(workers, f"quality: {out} is finished: nothing to do")
    else:
        _measure(config, work, facts, out, workers)
    if workers.first:
        report = write(Path(config.out), config.tracker)
        print_report(report, ["quality"])
        check_identical(report["quality"])


def _measure(config: QualityConfig, work: Work, facts: dict[str, Any], out: Path, workers: WorkerGroup) -> None:
    for sentence in contaminated(config, work.benchmarks):
        tell(workers, f"warning: {sentence}")
    sandbox = open_sandbox(config.sandbox) if work.executed else None
    if sandbox:
        tell(workers, f"sandbox: {sandbox.description}")
        with distributed.rank_local_errors():
            for language in work.executed if workers.first else ():
                sandbox.check(language)
    for name in set(config.decoders) - set(work.decoders):
        tell(workers, f"model={config.model} has no adaptive tokens: it is not decoded with {name}")
    machine = hardware()
    place = {  # what must be as it was for a run to go on
        "hardware": {name: machine[name] for name in ("cpu", "gpu")},
        "sandbox.level": sandbox.level if sandbox else None,
    }
    with distributed.folder(out, {**facts, **place}, workers) as partial:
        if workers.first and not (partial / HEADER).is_file():
            header = {
                "schema": SCHEMAS["quality"],
                **circumstances(config),
                "gated": ModelDirectory(config.model).gated,
                "sandbox": {"level": sandbox.level, "told": sandbox.description} if sandbox else None,
                **work.facts(config),
            }
            write_json(partial / HEADER, with_checksum(header))
        answers = UnitStore(partial / UNITS, [batch.name for batch in work.batches])
        _answer(config, work, answers, workers)
        verdicts = _judge(config, work, answers.read(), sandbox, partial / UNITS, workers)
        if workers.first:
            header = read_header(partial / HEADER)
            write_json(partial / RESULT, with_checksum(result(header, answers.read() | verdicts)))
            write_manifest(partial, "quality", facts)


def _answer(config: QualityConfig, work: Work, units: UnitStore, workers: WorkerGroup) -> None:
    """Give this rank's share of all answers; one model is in memory at a time."""
    mine = set(units.open(workers))
    with Progress(disable=not workers.first) as progress:
        task = progress.add_task("answers", total=len(mine))
        for who, folder in models(config).items():
            batches = [batch for batch in work.batches if batch.who == who and batch.name in mine]
            if not batches:
                continue
            model = replace(load(folder, config.dtype, workers.device(), setting=who), text=work.text)
            for batch in batches:
                units.save(batch.name, batch.unit(model, config))
                progress.advance(task)
            del model
    workers.wait()


class Case(NamedTuple):
    """A text as the answer to a problem."""

    key: str
    problem: Problem
    text: str


def cases(benchmarks: Mapping[str, Sequence[Problem]], units: Iterable[Mapping[str, Any]]) -> list[list[Case]]:
    """Return the distinct cases among the answers of `units`, in their order, in lists for a unit each."""
    problems = {(name, row.language, row.id): row for name, rows in benchmarks.items() for row in rows}
    distinct: dict[str, Case] = {}
    for unit in units:
        where = unit["benchmark"], unit["language"]
        for answer in unit["answers"]:
            if not answer["too_long"]:
                key = answer_key(*where, answer)
                distinct.setdefault(key, Case(key, problems[*where, answer["id"]], completion(answer)))
    rows = list(distinct.values())
    return [rows[start : start + TOGETHER] for start in range(0, len(rows), TOGETHER)]


def _judge(
    config: QualityConfig,
    work: Work,
    answers: Mapping[str, Any],
    sandbox: Sandbox | None,
    folder: Path,
    workers: WorkerGroup,
) -> dict[str, Any]:
    """Return the verdicts by unit. Each rank makes its share; the late ones are made once more, alone."""
    by_name = {}
    for index, part in enumerate(cases(work.benchmarks, answers.values())):
        # The digest tells lists apart: an answer whose file was damaged may be another the next time.
        digest = hashlib.sha256("".join(case.key for case in part).encode()).hexdigest()[:8]
        by_name[f"verdicts-{index:04}-{digest}"] = part
    units = UnitStore(folder, list(by_name))
    processes = max(1, (config.workers or len(os.sched_getaffinity(0))) // workers.world)
    mine = units.open(workers)
    with Progress(disable=not workers.first) as progress:
        for name in progress.track(mine, description="verdicts"):
            units.save(name, {"verdicts": judge(by_name[name], sandbox, processes)})
    workers.wait()
    verdicts = units.read()
    late = {
        f"{name}-again": [case for case in by_name[name] if LATE.fullmatch(unit["verdicts"][case.key][1])]
        for name, unit in verdicts.items()
    }
    again = UnitStore(folder, [name for name, part in late.items() if part])
    if workers.first:
        for name in again.open(distributed.ALONE):
            again.save(name, {"verdicts": judge(late[name], sandbox, processes=1)})
    workers.wait()
    return verdicts | again.read()


def judge(part: Sequence[Case], sandbox: Sandbox | None, processes: int) -> dict[str, list[Any]]:
    """Return [passed, reason] by key: by execution where the problem has tests, else by exact match."""
    programs = {case.key: program for case in part if (program := case.problem.program(case.text))}
    verdicts = sandbox.judge_all(list(programs.values()), processes) if sandbox and programs else []
    results = {key: [row.passed, row.reason] for key, row in zip(programs, verdicts, strict=True)}
    for case in part:
        if case.key not in programs:
            same, answer = case.problem.matches(case.text), (case.problem.answer or "").strip()
            results[case.key] = [same, "exact match" if same else f"no match: the answer is {answer!r}"]
    return results


def tell(workers: WorkerGroup, line: str) -> None:
    """Print a line once."""
    if workers.first:
        print_line(line)


def check_identical(quality: Mapping[str, Any]) -> None:
    """Raise UserError for a result that shows SDSAT to be lossy: it is written, and then fails every run."""
    lossy = [row for row in quality["same"] if row["identical"] < row["compared"]]
    if lossy and quality["settings"]["dtype"] == "float32":
        names = ", ".join(f"{row['benchmark']} {row['language']}".strip() for row in lossy)
        raise UserError(
            f"float32 answers must be identical to those of plain decoding, got differences in {names}",
            page=NOT_IDENTICAL,
        )
