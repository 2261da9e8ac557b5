"""Who runs the tasks of a phase: this machine's cores, a Ray cluster or Slurm.

A task's result lies in its files alone, so all three leave the same bytes. Ray and Slurm go through datatrove.
"""

import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from rich.progress import Progress

from conf import UserError
from conf.errors import MEMORY
from conf.stage import ROOT
from data_prep.job import Job, Phase, one_task, sweep
from data_prep.phases import PHASES, finish

SLURM_JOB = "slurm_job"

_job: Job  # of a worker process
_phases = {phase.name: phase for phase in PHASES}


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_local(job: Job) -> None:
    """Run all phases in processes of this machine."""
    sweep(job)
    workers = job.config.workers or cores()
    # Threads of the tokenizer would take the other workers' cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if workers == 1:
        _run_phases(job, lambda phase, tasks: map(partial(phase.run_task, job), tasks))
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["data_prep.executors"])
    with ProcessPoolExecutor(workers, context, _start_worker, (job,)) as pool:

        def run(phase: Phase, tasks: Sequence[int]) -> Iterable[None]:
            try:
                running = [
                    pool.submit(_run_in_worker, phase.name, task) for task in tasks
                ]
                for future in as_completed(running):
                    yield future.result()
            except BrokenProcessPool as error:
                raise UserError(
                    f"workers={workers}: a worker process died, perhaps for want of memory. Rerun the command "
                    "to go on from there, with fewer workers if it happens again",
                    page=MEMORY,
                ) from error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

        _run_phases(job, run)


def _run_phases(
    job: Job, run: Callable[[Phase, Sequence[int]], Iterable[None]]
) -> None:
    with Progress(transient=True) as progress:
        for phase in PHASES:
            tasks = phase.open_tasks(job) if phase.needed(job) else []
            for _ in progress.track(
                run(phase, tasks), total=len(tasks), description=f"{phase.name:>9}"
            ):
                pass


def _start_worker(job: Job) -> None:
    global _job
    _job = job
    # A worker whose parent was killed must not go on beside the next run.
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_worker(phase: str, task: int) -> None:
    _phases[phase].run_task(_job, task)


def run_rank(
    job: Job, phase: str, data: Any = None, rank: int = 0, world_size: int = 1
) -> None:
    """Run every world_size-th task of a phase from `rank` on; of "finish", make the result visible.

    The arguments from `data` on are those of a step of datatrove.
    """
    if phase == "finish":
        finish(job)
        return
    for task in range(rank, _phases[phase].tasks(job), world_size):
        _phases[phase].run_task(job, task)


def run_ray(job: Job) -> None:
    """Run all phases on the Ray cluster of this environment, or on one of this machine."""
    import ray
    from datatrove.executor.ray import RayPipelineExecutor
    from loguru import logger

    logger.disable("datatrove")  # its tasks' logs are in files
    if " " in sys.executable:  # Ray would try for ever to start its workers
        raise UserError(
            f"executor=ray needs a Python whose path has no space, got {sys.executable}"
        )
    environment = {
        "env_vars": {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    }
    join = partial(
        ray.init,
        ignore_reinit_error=True,
        log_to_driver=False,
        logging_level=logging.ERROR,
        include_dashboard=False,
        runtime_env=environment,
    )
    try:
        try:  # None joins the cluster that the environment names
            join(
                num_cpus=None
                if os.environ.get("RAY_ADDRESS")
                else job.config.workers or cores()
            )
        except (
            ValueError
        ):  # Ray knows of a cluster on this machine, whose cores are its own
            join()
    except ConnectionError as error:
        raise UserError(
            f"executor=ray: RAY_ADDRESS must be a cluster that answers, got {error}"
        ) from error
    for phase in PHASES:
        if not phase.needed(job) or not phase.open_tasks(job):
            continue
        logs = _logs(job.config.out) / phase.name
        RayPipelineExecutor(
            pipeline=[partial(run_rank, job, phase.name)],
            tasks=phase.tasks(job),
            workers=job.config.workers or -1,
            logging_dir=str(logs),
            skip_completed=False,  # a task knows whether it has been run
        ).run()
        if missing := phase.open_tasks(job):
            # Ray tells a task's error to its log only.
            raise UserError(
                f"executor=ray: {len(missing)} of {phase.tasks(job)} tasks of phase '{phase.name}' failed. See "
                f"{logs}/logs"
            )


def submit_slurm(job: Job) -> str:
    """Submit all phases as a chain of job arrays; return the number of the last, which makes the result
    visible.
    """
    from datatrove.executor.slurm import SlurmPipelineExecutor
    from loguru import logger

    logger.disable("datatrove")
    if shutil.which("sbatch") is None:
        raise UserError("executor=slurm needs the command sbatch on the path, got none")
    slurm = job.config.slurm
    ranks = job.config.workers or min(len(job.parts), 100)
    last: SlurmPipelineExecutor | None = None
    steps = [
        (phase.name, 1 if phase.tasks is one_task else ranks)
        for phase in PHASES
        if phase.needed(job)
    ]
    for name, tasks in [*steps, ("finish", 1)]:
        last = SlurmPipelineExecutor(
            pipeline=[partial(run_rank, job, name)],
            tasks=tasks,
            time=slurm.time,
            partition=str(slurm.partition),
            mem_per_cpu_gb=slurm.mem_per_cpu_gb,
            qos=slurm.qos,
            job_name=f"data_prep-{name}",
            env_command=_shell_setup(slurm.setup),
            logging_dir=str(_logs(job.config.out) / name),
            skip_completed=False,
            depends=last,
        )
    assert last is not None
    try:
        last.run()
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"executor=slurm: sbatch refused the jobs ({error}). Check slurm.*"
        ) from error
    (_logs(job.config.out) / SLURM_JOB).write_text(str(last.job_id))
    return str(last.job_id)


def refuse_while_queued(out: str) -> None:
    """Raise UserError when Slurm jobs that make `out` are still queued or running."""
    record = _logs(out) / SLURM_JOB
    if not record.is_file() or shutil.which("squeue") is None:
        return
    number = record.read_text()
    queue = subprocess.run(
        ["squeue", "--noheader", "--jobs", number], capture_output=True, text=True
    )
    if queue.returncode == 0 and queue.stdout.strip():
        raise UserError(
            f"out={out} must be a folder that no job writes, got Slurm job {number} in the queue. Wait for it, "
            f"or scancel {number}"
        )


def _logs(out: str) -> Path:
    # Beside the result, so that it does not hold them.
    path = Path(out).absolute()
    return path.with_name(f"{path.name}.logs")


def _shell_setup(setup: str) -> str:
    programs = shlex.quote(str(Path(sys.executable).parent))
    root = shlex.quote(str(ROOT))
    path = (
        f"export PATH={programs}:$PATH PYTHONPATH={root} TOKENIZERS_PARALLELISM=false"
    )
    return f"{setup}\n{path}" if setup else path
