"""A run of infer.study: its parts measured one after the other, written and told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from conf import UserError
from conf.characters import print_line
from conf.files import write_json
from conf.pages import NOT_IDENTICAL
from conf.sealed import read_result, sealed
from conf.stage import existing, is_finished, made_from, staged, write_manifest
from infer.benchmarks.reading import fingerprint_problems, read_problems
from infer.hardware import circumstances
from infer.study.ablation import measure_ablation, measure_ranks
from infer.study.bench import Bench
from infer.study.config import PARTS, StudyConfig
from infer.study.merging import measure_merging
from infer.study.methods import lossy, measure_methods, measure_sampling
from infer.study.plots import PLOTS
from infer.study.recurrence import measure_recurrence
from infer.study.step_time import measure_time
from infer.study.tables import print_study

MEASUREMENTS: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "methods": measure_methods,
    "sampling": measure_sampling,
    "time": measure_time,
    "recurrence": measure_recurrence,
    "ablation": measure_ablation,
    "merging": measure_merging,
    "ranks": measure_ranks,
}


def run(config: StudyConfig) -> None:
    """Measure and report, unless the folder already holds the report."""
    if config.threads:
        torch.set_num_threads(config.threads)
    made = _made(config)
    if is_finished(config.out, "study", made):
        print_line(f"study: {config.out} is finished: nothing to do")
        report = read_result(Path(config.out) / "report.json")
    else:
        report = _measured(config, made)
    print_study(report)
    _check_identical(report)


def _measured(config: StudyConfig, made: dict[str, Any]) -> dict[str, Any]:
    """The report, written."""
    with staged(config.out) as out:
        bench = Bench(config)
        report: dict[str, Any] = {"schema": 1, **circumstances(config)}
        with Progress() as progress:
            parts = [part for part in PARTS if part in config.parts]
            task = progress.add_task("", total=len(parts))
            for part in parts:
                progress.update(task, description=part)
                report[part] = MEASUREMENTS[part](bench)
                PLOTS[part](report[part], out / f"{part}.png")
                progress.advance(task)
        write_json(out / "report.json", sealed(report))
        write_manifest(out, "study", made)
    return report


def _made(config: StudyConfig) -> dict[str, Any]:
    """What determines the figures. The problems themselves count, not only where they lie."""
    made = made_from(config, existing({"model": config.model, "draft.model": config.draft.model}))
    problems = {
        f"prompts.{name}": fingerprint_problems(read_problems(name, prompts))
        for name, prompts in config.prompts.items()
    }
    return {**made, "inputs": {**made["inputs"], **problems}}


def _check_identical(report: dict[str, Any]) -> None:
    """A study that shows a lossy method is written, and then fails the run, and every later one."""
    found = [name for part in ("methods", "sampling") for name in lossy(report.get(part, []))]
    if found and report["settings"]["dtype"] == "float32":
        raise UserError(
            f"float32 outputs: wanted all identical to plain decoding, found differences in {', '.join(found)}",
            page=NOT_IDENTICAL,
        )
