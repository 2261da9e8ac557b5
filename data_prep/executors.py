"""Run the tasks of all phases on this machine's cores or on Slurm.

Slurm jobs run by datatrove's executor. Its local executor is not used, because it waits
forever for a worker that ran out of memory and was killed; `run_local` raises an error. A
task's result is only in its files, so both executors write the same bytes.
"""

import os
import shlex
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from rich.progress import Progress

from conf.errors import MEMORY, UserError
from conf.runs.stage import ROOT
from data_prep.job import Job, remove_stale_attempts
from data_prep.phases import PHASES, finish

SLURM_JOB = "slurm_job"  # file with the id of the last job, in the folder of logs
SLURM_WORKERS = 100  # default number of tasks in a job array
TASK_GB = 2  # memory of a Slurm task
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}

_job: Job  # the job of this worker process
_phases = {phase.name: phase for phase in PHASES}


def run_local(job: Job) -> None:
    """Run all phases in worker processes on this machine, or in this process if workers=1."""
    remove_stale_attempts(job)
    workers = job.config.workers or len(os.sched_getaffinity(0))
    # The tokenizer's threads would compete with the other workers for cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if workers == 1:
        _set_job(job)
        _run_phases(job, map)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["data_prep.executors"])
    try:
        with ProcessPoolExecutor(workers, context, _start_worker, (job,)) as pool:
            _run_phases(job, pool.map)
    except (BrokenProcessPool, EOFError, ConnectionError) as error:
        # An error with a cause comes from a task. Without a cause the fork server died.
        if error.__cause__ and not isinstance(error, BrokenProcessPool):
            raise
        raise UserError(
            f"workers={workers}: a worker process died, perhaps for lack of memory. "
            "Rerun the command to continue, with fewer workers if it happens again",
            page=MEMORY,
        ) from error


def _run_phases(job: Job, run: Any) -> None:
    """Run all phases with `run`, a function like `map`."""
    with Progress(transient=True) as progress:
        for phase in PHASES:
            tasks = phase.open_tasks(job)
            results = run(partial(_run_task, phase.name), tasks)
            for _ in progress.track(results, len(tasks), description=phase.name):
                pass


def _run_task(phase: str, task: int) -> None:
    _phases[phase].run_task(_job, task)


def _set_job(job: Job) -> None:
    global _job
    _job = job


def _start_worker(job: Job) -> None:
    _set_job(job)
    # If the parent is killed, the worker must end before the next run starts.
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_rank(
    job: Job, phase: str, data: Any = None, rank: int = 0, world_size: int = 1
) -> None:
    """Run the tasks rank, rank + world_size, ... of a phase, as a pipeline step of datatrove.

    The phase "finish" publishes the result.
    """
    if phase == "finish":
        finish(job)
        return
    for task in range(rank, _phases[phase].task_count(job), world_size):
        _phases[phase].run_task(job, task)


def submit_slurm(job: Job) -> str:
    """Submit all phases as a chain of job arrays; return the id of the last job."""
    from datatrove.executor.slurm import SlurmPipelineExecutor
    from loguru import logger

    logger.disable("datatrove")
    slurm = job.config.slurm
    ranks = job.config.workers or min(len(job.parts), SLURM_WORKERS)
    steps = {
        phase.name: 1 if phase.tasks == 1 else ranks
        for phase in PHASES
        if phase.needed(job)
    }
    programs = shlex.quote(str(Path(sys.executable).parent))
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in ENVIRONMENT.items())
    logs = _logs(job.config.out)
    last: SlurmPipelineExecutor | None = None
    for name, tasks in {**steps, "finish": 1}.items():
        last = SlurmPipelineExecutor(
            pipeline=[partial(run_rank, job, name)],
            tasks=tasks,
            time=slurm.time,
            partition=str(slurm.partition),
            mem_per_cpu_gb=TASK_GB,
            job_name=f"data_prep-{name}",
            env_command=f"export PATH={programs}:$PATH {variables}",
            logging_dir=str(logs / name),
            skip_completed=False,
            depends=last,
        )
    assert last is not None
    try:
        last.run()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"executor=slurm: sbatch failed: {error}. Check the slurm.* settings"
        ) from error
    number = str(last.job_id)
    (logs / SLURM_JOB).write_text(number)
    return number


def refuse_while_queued(out: str) -> None:
    """Raise UserError if Slurm jobs that write `out` are still queued or running."""
    record = _logs(out) / SLURM_JOB
    if not record.is_file() or shutil.which("squeue") is None:
        return
    number = record.read_text()
    command = ["squeue", "--noheader", "--jobs", number]
    queue = subprocess.run(command, capture_output=True, text=True)
    if queue.returncode == 0 and queue.stdout.strip():
        raise UserError(
            f"out={out} is being written by Slurm job {number}, which is in the queue. "
            f"Wait for it, or run scancel {number}"
        )


def _logs(out: str) -> Path:
    """Return the folder of Slurm's logs, a sibling of `out` that is not part of the result."""
    path = Path(out).absolute()
    return path.with_name(f"{path.name}.logs")
