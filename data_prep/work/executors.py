"""Who runs the tasks of a phase: this machine's cores, a Ray cluster or Slurm.

A task's result lies in its files alone, so all three leave the same bytes. Ray and Slurm
go through datatrove. Knows nothing of what a task does.
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
from conf.pages import MEMORY
from conf.stage import ROOT
from data_prep.work.finish import finish
from data_prep.work.job import Job
from data_prep.work.phases import PHASES, Phase, phase_named, run_task, sweep

SLURM_JOB = "slurm_job"

_job: Job  # of a worker process


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def open_tasks(job: Job, phase: Phase) -> list[int]:
    """The tasks of a phase that have not been run."""
    return [task for task in range(phase.tasks(job)) if not job.done(phase.name, task).is_dir()]


def wanted_phases(job: Job) -> list[Phase]:
    """The phases that this job has."""
    return [phase for phase in PHASES if phase.wanted(job)]


def run_local(job: Job) -> None:
    """Run all phases in processes of this machine."""
    sweep(job)
    workers = job.config.workers or cores()
    # Threads of the tokenizer would take the other workers' cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if workers == 1:
        _each_phase(job, lambda phase, tasks: map(partial(run_task, job, phase), tasks))
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["data_prep.work.executors"])
    with ProcessPoolExecutor(workers, context, _start_worker, (job,)) as pool:

        def run(phase: Phase, tasks: Sequence[int]) -> Iterable[None]:
            try:
                running = [pool.submit(_run_in_worker, phase.name, task) for task in tasks]
                for future in as_completed(running):
                    yield future.result()
            except BrokenProcessPool as error:
                raise UserError(
                    "a worker process died, perhaps for want of memory: rerun the command to go on from "
                    f"there, with fewer than workers={workers} if it happens again",
                    page=MEMORY,
                ) from error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

        _each_phase(job, run)


def _each_phase(job: Job, run: Callable[[Phase, Sequence[int]], Iterable[None]]) -> None:
    with Progress(transient=True) as progress:
        for phase in wanted_phases(job):
            tasks = open_tasks(job, phase)
            for _ in progress.track(run(phase, tasks), total=len(tasks), description=f"{phase.name:>9}"):
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
    run_task(_job, phase_named(phase), task)


class Tasks:
    """One rank's share of a phase's tasks, as datatrove calls it: step(data, rank, world_size)."""

    def __init__(self, job: Job, phase: str) -> None:
        self.job, self.phase = job, phase

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Run every world_size-th task from rank on."""
        phase = phase_named(self.phase)
        for task in range(rank, phase.tasks(self.job), world_size):
            run_task(self.job, phase, task)


class Finish:
    """The last step of a chain of jobs: makes the result visible."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Finish the job."""
        finish(self.job)


def run_ray(job: Job) -> None:
    """Run all phases on the Ray cluster of this environment, or on one of this machine."""
    import ray
    from datatrove.executor.ray import RayPipelineExecutor
    from loguru import logger

    logger.disable("datatrove")  # its tasks' logs are in files
    if " " in sys.executable:  # Ray would try for ever to start its workers
        raise UserError(f"executor=ray: wanted a Python whose path has no space, found {sys.executable}")
    join = partial(
        ray.init,
        ignore_reinit_error=True,
        log_to_driver=False,
        logging_level=logging.ERROR,
        include_dashboard=False,
        runtime_env=_environment(),
    )
    try:
        try:
            join(num_cpus=_local_cpus(job))
        except ValueError:  # Ray knows of a cluster on this machine, whose cores are its own
            join()
    except ConnectionError as error:
        raise UserError(f"executor=ray: wanted the cluster of RAY_ADDRESS, found {error}") from error
    for phase in wanted_phases(job):
        tasks = open_tasks(job, phase)
        if not tasks:
            continue
        RayPipelineExecutor(
            pipeline=[Tasks(job, phase.name)],
            tasks=phase.tasks(job),
            workers=job.config.workers or -1,
            logging_dir=str(_logs(job.config.out) / phase.name),
            skip_completed=False,  # a task knows whether it has been run
        ).run()
        if missing := open_tasks(job, phase):
            # Ray tells a task's error to its log only.
            raise UserError(
                f"executor=ray: {len(missing)} of {phase.tasks(job)} tasks of phase '{phase.name}' failed: see "
                f"{_logs(job.config.out) / phase.name}/logs"
            )


def submit_slurm(job: Job) -> str:
    """Submit all phases as a chain of job arrays; the number of the last, which makes the result visible."""
    from datatrove.executor.slurm import SlurmPipelineExecutor
    from loguru import logger

    logger.disable("datatrove")

    if shutil.which("sbatch") is None:
        raise UserError("executor=slurm: wanted the command sbatch on the path, found none")
    slurm = job.config.slurm
    ranks = job.config.workers or min(len(job.parts), 100)
    last: SlurmPipelineExecutor | None = None
    steps: list[tuple[str, int, Any]] = [
        (phase.name, 1 if phase.single else ranks, Tasks(job, phase.name)) for phase in wanted_phases(job)
    ]
    for name, tasks, step in [*steps, ("finish", 1, Finish(job))]:
        last = SlurmPipelineExecutor(
            pipeline=[step],
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
            f"executor=slurm: wanted jobs submitted, found that sbatch refused ({error})"
        ) from error
    (_logs(job.config.out) / SLURM_JOB).write_text(str(last.job_id))
    return str(last.job_id)


def refuse_while_queued(out: str) -> None:
    """Raises UserError when Slurm jobs that make `out` are still queued or running."""
    record = _logs(out) / SLURM_JOB
    if not record.is_file() or shutil.which("squeue") is None:
        return
    number = record.read_text()
    queue = subprocess.run(["squeue", "--noheader", "--jobs", number], capture_output=True, text=True)
    if queue.returncode == 0 and queue.stdout.strip():
        raise UserError(f"out={out}: wanted a folder that no job writes, found Slurm job {number} in the queue")


def _logs(out: str) -> Path:
    # Beside the result, so that it does not hold them.
    path = Path(out).absolute()
    return path.with_name(f"{path.name}.logs")


def _environment() -> dict[str, Any]:
    return {"env_vars": {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}}


def _shell_setup(setup: str) -> str:
    programs, root = shlex.quote(str(Path(sys.executable).parent)), shlex.quote(str(ROOT))
    path = f"export PATH={programs}:$PATH PYTHONPATH={root} TOKENIZERS_PARALLELISM=false"
    return f"{setup}\n{path}" if setup else path


def _local_cpus(job: Job) -> int | None:
    """Cores of a cluster that is started here; None to join the one that the environment names."""
    return None if os.environ.get("RAY_ADDRESS") else job.config.workers or cores()
