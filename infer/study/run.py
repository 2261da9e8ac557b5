"""A run of infer.study: its parts measured one after the other, written and printed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from conf import RankLocalError
from conf.console import print_line
from conf.errors import NOT_IDENTICAL
from conf.files import read_result, with_checksum, write_json
from conf.stage import existing, is_finished, made_from, staged, write_manifest
from infer.benchmarks.reading import fingerprint_problems, read_problems
from infer.measure import circumstances
from infer.measure.distributed import WorkerGroup, init_workers, rank_local_errors
from infer.models.parallel import place
from infer.study import PARTS, StudyConfig
from infer.study.figures import PLOTS, print_study
from infer.study.measurements import MEASUREMENTS, lossy
from infer.study.models import StudyModels


def measure_study(config: StudyConfig) -> None:
    """Measure and report, unless the folder already holds the report. Under torchrun the ranks divide the
    prompts, each with models of its own, or the model.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.divide == "model":  # each does all the work, the first one reports
        rank, _, local = place()
        workers = WorkerGroup(rank, world=1, local=local)
    else:
        workers = init_workers()
    facts = _made(config)
    if not is_finished(config.out, "study", facts):
        _measure(config, facts, workers)
    elif workers.first:
        print_line(f"study: {config.out} is finished: nothing to do")
    if workers.first:
        report = read_result(Path(config.out) / "report.json")
        print_study(report)
        # A study that shows a lossy method is written, and then fails the run, and every later one.
        names = [name for part in ("methods", "sampling") for name in lossy(report.get(part, []))]
        if names and report["settings"]["dtype"] == "float32":
            raise RankLocalError(
                f"float32 outputs must all be those of plain decoding, got differences in {', '.join(names)}",
                page=NOT_IDENTICAL,
            )


def _measure(config: StudyConfig, facts: dict[str, Any], workers: WorkerGroup) -> None:
    with _folder(config.out, workers) as out:
        models = StudyModels(config, workers)
        report: dict[str, Any] = {"schema": 1, **circumstances(config), "processes": place()[1]}
        with Progress(disable=not workers.first) as progress, rank_local_errors():
            parts = [part for part in PARTS if part in config.parts]
            task = progress.add_task("", total=len(parts))
            for part in parts:
                progress.update(task, description=part)
                report[part] = MEASUREMENTS[part](models)
                if out:
                    PLOTS[part](report[part]).savefig(out / f"{part}.png", dpi=150)
                progress.advance(task)
        if out:
            write_json(out / "report.json", with_checksum(report))
            write_manifest(out, "study", facts)


@contextmanager
def _folder(out: str, workers: WorkerGroup) -> Iterator[Path | None]:
    """Return the folder to write, on the first rank; the others have none."""
    if not workers.first:
        yield None
        return
    with rank_local_errors(), staged(out) as folder:
        yield folder


def _made(config: StudyConfig) -> dict[str, Any]:
    """Return what determines the figures: the problems themselves too, not only where they lie."""
    facts = made_from(config, existing({"model": config.model, "draft.model": config.draft.model}))
    problems = {
        f"prompts.{name}": fingerprint_problems(read_problems(name, prompts))
        for name, prompts in config.prompts.items()
    }
    return {**facts, "inputs": {**facts["inputs"], **problems}}
