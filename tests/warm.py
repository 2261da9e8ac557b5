"""Run commands in forks of a server that has already imported PyTorch.

Importing PyTorch, Transformers and DeepSpeed takes 5 to 8 seconds, usually longer than the command itself. A
fork behaves like a new process except for its imports. Tests of imports, of torchrun itself or of killed
processes need a real command.
"""

import atexit
import gc
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

# Modules that the server imports. DeepSpeed imports the last four, and PyTorch's compiler, for each engine.
IMPORTS = [
    "conf.settings.cli",
    "train.trainer",
    "train.flops",
    "train.page",
    "train.export.sidecars",
    "infer.bench.run",
    "torch.utils.benchmark",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
    "distutils.ccompiler",
]

SERVER_KILLED = (
    255  # multiprocessing's exit code for a process after its server has ended
)
SECONDS = 300  # time limit of all ranks together
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(IMPORTS)


def run_ranks(
    module: str,
    *arguments: object,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...` in `ranks` processes; several get torchrun's variables.

    The result has the output of all ranks and the return code of `call_ranks`.
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
    """Call a module's function in `ranks` processes; several get torchrun's variables.

    Return 0, or the exit code of the first rank that fails; that ends all ranks. The processes are not forks
    of pytest itself: such forks inherited locks of its threads, and ranks sometimes waited forever.
    """
    environment = dict(os.environ if env is None else env)
    processes = [
        forks.Process(target=_call, args=(environment | variables, function, arguments))
        for variables in (_torchrun_variables(ranks) if ranks > 1 else [{}])
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
        for process in processes:  # multiprocessing cannot kill them without its server
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        raise RuntimeError(
            "The fork server of tests/warm.py was killed, perhaps for lack of memory. Run the tests again."
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
    gc.freeze()  # a collection would search, and so copy, the server's half a million objects
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def _run_module(command: list[str], streams: list[Path]) -> None:
    # Forks must not run the server's exit functions: the first fork removed W&B's folder for tables, and later
    # forks logged no table.
    atexit._clear()
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_APPEND), descriptor)
    module, *sys.argv[1:] = command
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not run them at a process's end
