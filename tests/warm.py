"""Commands in processes of their own that need not import PyTorch first: forks of a server that did.

Importing PyTorch, Transformers and DeepSpeed costs every process of a test 5 to 8 seconds, most of them more
than what it is started for. A fork behaves as a new process does, but for its imports: what a test says about
imports, about torchrun itself or about a process that is killed needs a real command.
"""

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

IMPORTS = [  # by the server; DeepSpeed imports the last one, and with it PyTorch's compiler, for every engine
    "train.trainer",
    "train.flops",
    "train.export.sidecars",
    "infer.bench.run",
    "deepspeed.runtime.zero.muon.muon_optimizer",
]

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(IMPORTS)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    **_: Any,
) -> subprocess.CompletedProcess[str]:
    """Run [sys.executable, "-m", MODULE, ...] as `subprocess.run` does with its output captured as text."""
    python, flag, module, *arguments = command
    assert (python, flag) == (sys.executable, "-m")
    return run_ranks(module, *arguments, ranks=1, env=env, timeout=timeout)


def run_ranks(
    module: str,
    *arguments: object,
    ranks: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...` in `ranks` processes, which if several have torchrun's variables.

    Output is that of all ranks; the return code is that of the first rank that fails, which ends the others.
    """
    command, environment = (
        [module, *map(str, arguments)],
        dict(os.environ if env is None else env),
    )
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        processes = [
            forks.Process(
                target=_start, args=(command, environment | variables, streams)
            )
            for variables in (_torchrun_variables(ranks) if ranks > 1 else [{}])
        ]
        for process in processes:
            process.start()
        try:
            code = _join(processes, timeout, command)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return subprocess.CompletedProcess(
            command, code, *(stream.read_text() for stream in streams)
        )


def call_ranks(
    function: Callable[..., None], *arguments: object, ranks: int, timeout: float = 120
) -> list[int | None]:
    """Return the exit codes of `ranks` processes with torchrun's variables that call a module's function.

    A fork of pytest's own process inherited locks that its threads held: ranks now and then waited for ever.
    """
    processes = [
        forks.Process(target=_call, args=(variables, function, arguments))
        for variables in _torchrun_variables(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _call(
    environment: dict[str, str],
    function: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    os.environ.update(environment)
    function(*arguments)


def _join(processes: list[Any], timeout: float, command: list[str]) -> int:
    deadline, running = time.monotonic() + timeout, list(processes)
    while running:
        if not wait(
            [process.sentinel for process in running], deadline - time.monotonic()
        ):
            raise subprocess.TimeoutExpired(command, timeout)
        for process in [process for process in running if process.exitcode is not None]:
            running.remove(process)
            if process.exitcode:
                return process.exitcode
    return 0


def _torchrun_variables(ranks: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]


def _start(
    command: list[str], environment: dict[str, str], streams: list[Path]
) -> None:
    # What the server made while it imported, no fork removes: the first removed W&B's folder for tables, and
    # later ones logged no table.
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_APPEND), descriptor)
    module, *sys.argv[1:] = command
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # as a new process does at its end, and multiprocessing's do not
