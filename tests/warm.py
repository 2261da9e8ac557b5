"""Commands in processes of their own that need not import PyTorch first: forks of a server that did.

Importing PyTorch, Transformers and DeepSpeed costs every process of a test 5 to 8 seconds, most of them more
than what it is started for. A fork behaves as a new process does, but for its imports: what a test says about
imports, about torchrun itself or about a process that is killed needs a real command.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

IMPORTS = [  # by the server; DeepSpeed imports the last one, and with it PyTorch's compiler, for every engine
    "train.trainer",
    "train.flops",
    "train.export.sidecars",
    "infer.bench.run",
    "deepspeed.runtime.zero.muon.muon_optimizer",
]

SERVER_KILLED = 255  # multiprocessing's exit code for a process whose server has gone
SECONDS = 300  # of all ranks, at most
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(IMPORTS)


def run_ranks(
    module: str,
    *arguments: object,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...` in `ranks` processes, which if several have torchrun's variables.

    Output is that of all ranks; the return code is `call_ranks`'s.
    """
    command = [module, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        code = call_ranks(_run_module, command, streams, ranks=ranks, env=env)
        return subprocess.CompletedProcess(
            command, code, *(stream.read_text() for stream in streams)
        )


def call_ranks(
    function: Callable[..., None],
    *arguments: object,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
) -> int:
    """Call a module's function in `ranks` processes, which if several have torchrun's variables.

    Return the exit code of the first rank that fails, which ends the others, or 0. A fork of pytest's own
    process inherited locks that its threads held: ranks now and then waited for ever.
    """
    environment = dict(os.environ if env is None else env)
    processes = [
        forks.Process(target=_call, args=(environment | own, function, arguments))
        for own in (_torchrun_variables(ranks) if ranks > 1 else [{}])
    ]
    deadline, running = time.monotonic() + SECONDS, list(processes)
    try:
        for process in processes:
            process.start()
        while running:
            sentinels = [process.sentinel for process in running]
            if not wait(sentinels, deadline - time.monotonic()):
                raise TimeoutError(f"{function} {arguments}")
            for process in [item for item in running if item.exitcode is not None]:
                running.remove(process)
                if process.exitcode == SERVER_KILLED:
                    raise EOFError(process)
                if process.exitcode:
                    return process.exitcode
        return 0
    except (EOFError, ConnectionError) as error:
        for process in processes:  # without the server multiprocessing kills none
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        raise RuntimeError(
            "The fork server of tests/warm.py was killed, perhaps for want of memory. Run the tests again."
        ) from error
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


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


def _call(
    environment: dict[str, str],
    function: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def _run_module(command: list[str], streams: list[Path]) -> None:
    # What the server made while it imported, no fork removes: the first removed W&B's folder for tables, and
    # later ones logged no table.
    atexit._clear()
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_APPEND), descriptor)
    module, *sys.argv[1:] = command
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # as a new process does at its end, and multiprocessing's do not
